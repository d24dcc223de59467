"""Debian packages of another suite, unpacked into a private prefix; rule: unpack only what apt
itself has verified.

apt does the work: with a sources list, state and cache of its own it fetches the suite's signed
Release file, checks it against the Debian archive keyring, the package lists against the Release
file and each package against the lists (https://manpages.debian.org/apt-secure). Nothing of the
machine's own package database is read or changed. The mirror is the one that the machine's own apt
is configured with.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KEYRINGS = (
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
)
DOWNLOAD_SECONDS = 900


class ToolError(Exception):
    """What went wrong and what to do about it, for the one who runs the tool."""


def say(text: str) -> None:
    """Tell the one who runs the tool (standard error, so that --json output stays clean)."""
    print(text, file=sys.stderr, flush=True)


def call(
    argv: Sequence[str | os.PathLike[str]], *, seconds: float = 120, cwd: Path | None = None
) -> str:
    """Run a command without a terminal and return its standard output; raises ToolError with its
    errors.
    """
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    words = [os.fspath(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=cwd,
            env=environment,
        )
    except FileNotFoundError as error:
        raise ToolError(f"{words[0]} is not installed; this tool needs it") from error
    except OSError as error:
        raise ToolError(f"{words[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"'{' '.join(words)}' did not end within {seconds:.0f} s") from error
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip()[-2000:]
        raise ToolError(f"'{' '.join(words)}' failed with status {done.returncode}:\n{reason}")
    return done.stdout


def succeeds(argv: Sequence[str | os.PathLike[str]], *, seconds: float = 60) -> bool:
    """Whether a command ends with status 0."""
    try:
        call(argv, seconds=seconds)
    except ToolError:
        return False
    return True


def version_at_least(version: str, least: str) -> bool:
    """Compare two Debian version strings the way dpkg does."""
    return succeeds(["dpkg", "--compare-versions", version, "ge", least])


def candidate_version(package: str) -> str | None:
    """Version that the machine's own apt would install, or None."""
    found = re.search(r"^  Candidate: (\S+)$", call(["apt-cache", "policy", package]), re.MULTILINE)
    return None if found is None or found.group(1) == "(none)" else found.group(1)


def install_packages(packages: Sequence[str]) -> None:
    """Install packages of the machine's own distribution (needs root)."""
    if os.geteuid() != 0:
        raise ToolError(
            f"not root: run 'apt-get install {' '.join(packages)}' yourself, then this again"
        )
    if any(candidate_version(package) is None for package in packages):
        call(["apt-get", "update"], seconds=DOWNLOAD_SECONDS)
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    say(f"installing {' '.join(packages)} with apt")
    try:
        call(command, seconds=DOWNLOAD_SECONDS)
    except ToolError:
        # Package lists older than the mirror name versions that are gone; fresh lists cure that.
        call(["apt-get", "update"], seconds=DOWNLOAD_SECONDS)
        call(command, seconds=DOWNLOAD_SECONDS)


def debian_mirror() -> str:
    """Address of the Debian archive that the machine's own apt is configured with (security and
    others left out).
    """
    listing = [
        "apt-get",
        "indextargets",
        "--format",
        "$(ORIGIN)|$(LABEL)|$(REPO_URI)",
        "Created-By: Packages",
    ]
    for attempt in range(2):
        for line in call(listing).splitlines():
            origin, label, address = line.split("|", 2)
            if origin == "Debian" and label == "Debian":
                return address
        if attempt == 0 and os.geteuid() == 0:
            # Without downloaded lists apt does not know which of its sources are Debian's own.
            say("apt has no package lists yet: apt-get update")
            call(["apt-get", "update"], seconds=DOWNLOAD_SECONDS)
    raise ToolError("apt is configured with no Debian archive; name one with --mirror ADDRESS")


def archive_keyring() -> str:
    """Path of the Debian archive keyring, brought up to date by install_packages where it is
    missing.
    """
    for path in KEYRINGS:
        if os.path.exists(path):
            return path
    install_packages(["debian-archive-keyring"])
    for path in KEYRINGS:
        if os.path.exists(path):
            return path
    raise ToolError(
        f"no Debian archive keyring at any of {', '.join(KEYRINGS)}; install debian-archive-keyring"
    )


@dataclass(frozen=True)
class Suite:
    """A Debian suite seen through an apt of its own below `root`, a folder that the caller throws
    away.
    """

    name: str
    root: Path
    architecture: str
    _options: tuple[str, ...] = field(repr=False)

    @classmethod
    def open(
        cls, name: str, root: Path, mirror: str | None = None, *, allow_expired: bool = False
    ) -> Suite:
        """Fetch and verify the suite's package lists (about 10 MB).

        `allow_expired` accepts a Release file past its Valid-Until, as an archive of the past
        serves it. It must still be signed by Debian; only the protection against being shown an old
        state is given up.
        """
        if re.fullmatch(r"[a-z][a-z0-9-]*", name) is None:
            raise ToolError(f"{name!r} is no Debian suite name; trixie or sid are")
        address = mirror or debian_mirror()
        architecture = call(["dpkg", "--print-architecture"]).strip()
        for folder in ("state/lists/partial", "cache/archives/partial", "etc", "debs"):
            (root / folder).mkdir(parents=True)
        (root / "state/status").touch()
        source = f"deb [arch={architecture} signed-by={archive_keyring()}] {address} {name} main\n"
        (root / "etc/sources.list").write_text(source)
        settings = {
            "Dir::Etc::sourcelist": str(root / "etc/sources.list"),
            "Dir::Etc::sourceparts": "-",
            "Dir::Etc::preferences": "-",
            "Dir::Etc::preferencesparts": "-",
            "Dir::State": str(root / "state"),
            "Dir::State::status": str(root / "state/status"),
            "Dir::Cache": str(root / "cache"),
            # container images switch apt's cache off; with it a question takes milliseconds
            "Dir::Cache::pkgcache": "pkgcache.bin",
            "Acquire::GzipIndexes": "false",
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            # apt's unprivileged download user cannot enter a private folder
            "APT::Sandbox::User": "root",
            "APT::Get::AllowUnauthenticated": "false",
            "Acquire::AllowInsecureRepositories": "false",
            **({"Acquire::Check-Valid-Until": "false"} if allow_expired else {}),
            "APT::Update::Error-Mode": "any",
            "Acquire::Retries": "3",
        }
        suite = cls(
            name,
            root,
            architecture,
            tuple(word for key in settings for word in ("-o", f"{key}={settings[key]}")),
        )
        say(f"reading the package lists of Debian {name} from {address}")
        try:
            suite._apt("apt-get", "update")
        except ToolError as error:
            if "NO_PUBKEY" not in str(error) or os.geteuid() != 0:
                raise
            say("the Debian archive keyring is older than the suite's keys: bringing it up to date")
            call(["apt-get", "update"], seconds=DOWNLOAD_SECONDS)
            install_packages(["debian-archive-keyring"])
            suite._apt("apt-get", "update")
        return suite

    def _apt(self, program: str, *words: str, cwd: Path | None = None) -> str:
        return call([program, *self._options, *words], seconds=DOWNLOAD_SECONDS, cwd=cwd)

    def fields(self, package: str) -> dict[str, str]:
        """Control fields of the suite's version of a package, empty where the suite has none."""
        try:
            text = self._apt("apt-cache", "show", "--no-all-versions", package)
        except ToolError as error:
            if "No packages found" in str(error):
                return {}
            raise
        return dict(re.findall(r"^([A-Z][A-Za-z-]*): (.*)$", text, re.MULTILINE))

    def version(self, package: str) -> str:
        """The suite's version of a package."""
        try:
            return self.fields(package)["Version"]
        except KeyError:
            raise ToolError(
                f"Debian {self.name} has no package {package} for {self.architecture}"
            ) from None

    def library_closure(self, packages: Sequence[str]) -> list[str]:
        """`packages` and every shared library package that they need, directly or through such
        packages.
        """
        wanted = list(packages)
        for package in wanted:  # grows while it is walked
            fields = self.fields(package)
            if not fields:
                raise ToolError(
                    f"Debian {self.name} has no package {package} for {self.architecture}"
                )
            for clause in ", ".join(
                filter(None, (fields.get("Pre-Depends"), fields.get("Depends")))
            ).split(", "):
                name = re.split(r"[ :(|]", clause, maxsplit=1)[0]
                if name.startswith(("lib", "zlib")) and name not in wanted:
                    wanted.append(name)
        return wanted

    def unpack(self, packages: Sequence[str], target: Path) -> dict[str, str]:
        """Download packages, verified by apt, and unpack them below `target`; returns their
        versions.
        """
        target.mkdir(parents=True, exist_ok=True)
        debs = Path(tempfile.mkdtemp(dir=self.root / "debs"))
        say(f"downloading {len(packages)} packages of Debian {self.name}: {' '.join(packages)}")
        self._apt("apt-get", "download", "-q", *packages, cwd=debs)
        archives = sorted(debs.glob("*.deb"))
        if len(archives) != len(packages):
            raise ToolError(f"apt downloaded {len(archives)} of {len(packages)} packages")
        versions: dict[str, str] = {}
        for archive in archives:
            name, version = call(
                ["dpkg-deb", "--show", "--showformat=${Package} ${Version}", archive]
            ).split()
            versions[name] = version
            call(["dpkg-deb", "--extract", archive, target])
        return versions


def needed_libraries(binary: Path) -> list[str]:
    """NEEDED entries of an ELF file, in order."""
    dynamic = call(["readelf", "--dynamic", "--wide", binary])
    return re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)


def interpreter(binary: Path) -> str:
    """Path of the dynamic loader that an ELF program asks for."""
    found = re.search(
        r"program interpreter: (.+)\]", call(["readelf", "--program-headers", "--wide", binary])
    )
    if found is None:
        raise ToolError(f"{binary} asks for no dynamic loader")
    return found.group(1)


def _libraries_below(tree: Path) -> dict[str, Path]:
    return {
        path.name: path
        for path in sorted(tree.rglob("*.so*"))
        if path.exists() and not path.is_dir()
    }


def copy_libraries(suite: Suite, binaries: Sequence[Path], tree: Path, lib: Path) -> None:
    """Copy the dynamic loader and every library that `binaries` need from the unpacked `tree` into
    the folder `lib`.

    The first of the binaries is a program; what it loads while it runs (extension modules) may
    follow it.
    """
    lib.mkdir(parents=True, exist_ok=True)
    offered = _libraries_below(tree)
    pending = [
        os.path.basename(interpreter(binaries[0])),
        *(name for each in binaries for name in needed_libraries(each)),
    ]
    taken: set[str] = set()
    while pending:
        name = pending.pop()
        if name in taken:
            continue
        if name not in offered:
            raise ToolError(f"no package of Debian {suite.name} that was unpacked holds {name}")
        taken.add(name)
        shutil.copyfile(offered[name].resolve(), lib / name)
        (lib / name).chmod(0o755)
        pending.extend(needed_libraries(offered[name].resolve()))


def bind(suite: Suite, binary: Path, lib: Path) -> None:
    """Write into a program that its loader and libraries are those in `lib`, where they may arrive
    only later.

    RPATH, not RUNPATH, because only RPATH also counts for what the libraries themselves need. One
    call does it all: patching a file twice grows it twice. Programs that are not
    position-independent are refused: patchelf 0.18 makes their segments overlap.
    """
    if "DYN" not in call(["readelf", "--file-header", binary]):
        raise ToolError(
            f"{binary} is not position-independent: start it through its loader instead"
        )
    # patchelf comes from the same suite and runs under the suite's own loader and libraries, so the
    # machine needs none.
    tools = suite.root / "patchelf"
    suite.unpack(suite.library_closure(["patchelf"]), tools)
    name = os.path.basename(interpreter(binary))
    offered = _libraries_below(tools)
    folders = ":".join(sorted({str(path.parent) for path in offered.values()}))
    patchelf: list[str | os.PathLike[str]] = [
        offered[name],
        "--library-path",
        folders,
        tools / "usr/bin/patchelf",
    ]
    call([*patchelf, "--set-interpreter", lib / name, "--force-rpath", "--set-rpath", lib, binary])


def keep_licences(tree: Path, build: Path) -> None:
    """Keep the copyright file of every unpacked package beside what was taken from it."""
    for path in tree.glob("usr/share/doc/*/copyright"):
        if path.exists():
            place = build / "share/doc" / path.parent.name
            place.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place / "copyright")


@contextlib.contextmanager
def fresh_folder(prefix: Path, mark: str) -> Iterator[Path]:
    """An empty folder beside `prefix`, to be filled and swapped in; gone at the end of the block if
    it was not.

    Refuses a prefix that holds something else: one without the file `mark` in it was not made by
    this tool.
    """
    if prefix.exists() and any(prefix.iterdir()) and not (prefix / mark).is_file():
        raise ToolError(
            f"{prefix} is not empty and holds no {mark}: not replacing it; name another --prefix"
        )
    prefix.parent.mkdir(parents=True, exist_ok=True)
    build = Path(tempfile.mkdtemp(prefix=f".{prefix.name}.", dir=prefix.parent))
    build.chmod(0o755)
    try:
        yield build
    finally:
        shutil.rmtree(build, ignore_errors=True)


@contextlib.contextmanager
def swapped_in(build: Path, prefix: Path) -> Iterator[None]:
    """Put `build` at `prefix` for the block; an error in the block puts the old prefix back."""
    old = prefix.with_name(f".{prefix.name}.old-{os.getpid()}")
    if prefix.exists():
        prefix.rename(old)
    build.rename(prefix)
    try:
        yield
    except BaseException:
        prefix.rename(build)
        if old.exists():
            old.rename(prefix)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def only_one(prefix: Path) -> Iterator[None]:
    """Let one installer at a time work on a prefix; others wait for it."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with open(prefix.with_name(f".{prefix.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

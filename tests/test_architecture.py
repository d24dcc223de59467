"""The architecture: who may import whom, what is pure, what is installed; read from the sources."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "icecore"
FLOORS = ("store", "host", "dumper", "restorer", "service")
#: What a program that uses icecore calls, and what people and the service call.
LIBRARY = {"access", "api", "repository", "snapshots"}
FACE = {"__main__", "cli", "commands", "node", "remote", "worker", "zygote"}

GROUND = {
    "icecore.errors",
    "icecore.environment",
    "icecore.events",
    "icecore.config",
    "icecore.config.kinds",
    "icecore.config.loading",
    "icecore.private",
    "icecore.sizes",
    "icecore.text",
    "icecore.units",
}
# floor -> the floors whose modules it may import, its own included
MAY_IMPORT = {
    "ground": {"ground"},
    "store": {"ground", "store"},
    "host": {"ground", "host"},
    "dumper": {"ground", "store", "host", "dumper"},
    "restorer": {"ground", "store", "host", "restorer"},
    "service": {"ground", "store", "host", "dumper", "restorer", "service"},
    "library": {"ground", "store", "host", "dumper", "restorer", "service", "library"},
    "face": {"ground", "store", "host", "dumper", "restorer", "service", "library", "face"},
}

# Inside the store, formats turn bytes into values and back, backends move bytes, and neither knows
# the other.
FORMATS, BACKENDS = "icecore.store.format.", "icecore.store.backend."
PLAIN_BACKENDS = {f"{BACKENDS}{name}" for name in ("base", "local", "memory", "s3")}
DOES_IO = {
    "asyncio",
    "aiohttp",
    "boto3",
    "http",
    "io",
    "mmap",
    "os",
    "pathlib",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
}


@dataclass(frozen=True)
class Module:
    """A module of the tree, with its installed name."""

    name: str
    path: Path

    @property
    def floor(self) -> str:
        """The module's floor. `icecore` itself hands out names of the library."""
        if self.name in GROUND:
            return "ground"
        part = self.name.split(".")[1] if "." in self.name else ""
        if part in FLOORS:
            return part
        return "face" if part in FACE else "library"

    @property
    def package(self) -> str:
        """The package from which its relative imports start."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return tuple(found)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(module: Module, names: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield line and target of every import, wherever it stands; `names` are the modules of the
    tree.
    """
    for node in ast.walk(parsed(module.path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in names else base


def target_floor(target: str) -> str | None:
    """Return the floor of an imported module, or None for a foreign one."""
    return Module(target, ROOT).floor if target.split(".")[0] == "icecore" else None


def test_the_tree_was_read() -> None:
    names = {module.name for module in modules()}
    assert {
        "icecore",
        "icecore.store",
        "icecore.host",
        "icecore.dumper",
        "icecore.restorer",
        "icecore.errors",
    } <= names


def test_floors() -> None:
    names = frozenset(module.name for module in modules())
    wrong = [
        f"{module.path.relative_to(ROOT)}:{line}: {module.floor} imports {target} ({target_floor(target)})"
        for module in modules()
        if module.name != "icecore"  # the package's own __init__ has its own test below
        for line, target in imports(module, names)
        if (floor := target_floor(target)) is not None and floor not in MAY_IMPORT[module.floor]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_floor_test_can_fail(tmp_path: Path) -> None:
    """The test sees relative imports, imports inside functions and `from icecore import name`."""
    path = tmp_path / "log.py"
    path.write_text(
        "from ...host.kernel import procfs\n"
        "def f():\n    import icecore.dumper.freeze.window\n"
        "from icecore import Repository, errors\n"
    )
    found = list(
        imports(
            Module("icecore.store.log.chain", path),
            frozenset({"icecore.host.kernel.procfs", "icecore.errors"}),
        )
    )
    targets = sorted((target, target_floor(target)) for _, target in found)
    assert targets == [
        ("icecore", "library"),
        ("icecore.dumper.freeze.window", "dumper"),
        ("icecore.errors", "ground"),
        ("icecore.host.kernel.procfs", "host"),
    ]


@pytest.mark.parametrize(
    "module",
    [
        "icecore.dumper.freeze.guard_process",
        "icecore.host.gpu.helper",
        "icecore.restorer.guard.guard_process",
    ],
)
def test_what_every_dump_or_restore_starts_loads_nothing_heavy(module: str) -> None:
    """Each of them is a process, and numpy takes three quarters of the start-up time of a process
    that loads it.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys, {module}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & {
        "numpy",
        "zstandard",
        "rich",
        "numcodecs",
        "google.protobuf",
        "asyncio",
    }


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        (
            "icecore.dumper.freeze.guard_process",
            {"typing", "dataclasses", "inspect", "uuid", "icecore.host.criu.program"},
        ),
        ("icecore.restorer.place.placer_process", {"asyncio"}),
    ],
)
def test_what_a_dump_or_restore_waits_for_loads_little(module: str, slow: set[str]) -> None:
    """Of its start these would take a third, or an eighth."""
    words = [sys.executable, "-P", "-c"]
    words.append(
        f"import sys; before = {{*sys.modules}}; import {module}; "
        "print(*({*sys.modules} - before))"
    )
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert module in loaded and "icecore.host.rpc.packets" in loaded
    assert not loaded & slow


def test_the_guard_of_a_restore_loads_the_standard_library_alone() -> None:
    """It is started without the paths of packages, and as often as a restore is."""
    spec = importlib.util.find_spec("icecore")
    assert spec is not None and spec.origin is not None
    code = (
        "import sys; sys.path.append(sys.argv[1]); import icecore.restorer.guard.guard_process; "
        "print(*sys.modules)"
    )
    root = str(Path(spec.origin).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, root], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "icecore.host.rpc.packets" in loaded
    assert not loaded & {"typing", "dataclasses", "pathlib", "subprocess", "msgspec", "numpy"}


#: What a process that has to start fast must not load.
_HEAVY = {
    "numpy",
    "asyncio",
    "ssl",
    "zstandard",
    "rich",
    "cryptography",
    "numcodecs",
    "google.protobuf",
    "boto3",
    "obstore",
    "aiohttp",
    "tomllib",
    "secrets",
    "hmac",
    "getpass",
    "shtab",
    "icecore.api",
    "icecore.repository",
    "icecore.dumper",
    "icecore.restorer",
    "icecore.store",
    "icecore.host.cuda",
    "icecore.host.gpu",
    "icecore.host.resident",
    "icecore.host.criu",
}


def loaded_by(code: str, *words: str, **environment: str) -> set[str]:
    """Return the modules that a fresh interpreter loads for ``code``, but for those that it loads
    as it starts.
    """
    code = (
        "import sys; before = {*sys.modules}\n"
        + code
        + "\nprint('\\n', *sorted({*sys.modules} - before))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


_COMMAND = "from icecore.cli import main\nassert main(sys.argv[1:]) == 0"


def test_ps_loads_neither_numpy_nor_the_store(tmp_path: Path) -> None:
    loaded = loaded_by(_COMMAND, "ps", "-a", ICECORE_STATE=str(tmp_path / "state"))
    assert "icecore.host.jobs.registry" in loaded
    assert not loaded & _HEAVY


def test_ls_loads_no_dumper_restorer_or_bucket_client(tmp_path: Path) -> None:
    """It opens the repository, whose formats are arrays of numpy."""
    place = str(tmp_path / "repository")
    state = str(tmp_path / "state")
    assert loaded_by(_COMMAND, "init", place, ICECORE_STATE=state)
    loaded = loaded_by(_COMMAND, "-r", place, "ls", ICECORE_STATE=state)
    assert "icecore.repository" in loaded
    unwanted = {
        "rich",
        "numcodecs",
        "google.protobuf",
        "boto3",
        "obstore",
        "aiohttp",
        "getpass",
        "shtab",
        "icecore.api",
        "icecore.dumper",
        "icecore.restorer",
        "icecore.host.cuda",
        "icecore.host.gpu",
        "icecore.host.criu",
        "icecore.store.snapshot",
        "icecore.store.maintenance",
        "icecore.store.backend.s3",
    }
    assert not loaded & unwanted


def test_the_watchdog_loads_nothing_of_the_store_but_its_clock() -> None:
    loaded = loaded_by("import icecore.service.supervision.watchdog")
    assert {name for name in loaded if name.startswith("icecore.store.")} == {
        "icecore.store.log",
        "icecore.store.log.lease_clock",
    }
    assert not loaded & (_HEAVY - {"icecore.store"})


def test_the_programming_interface_loads_a_dumper_and_a_restorer_on_use() -> None:
    loaded = loaded_by("import icecore.api")
    assert "icecore.host.jobs.registry" in loaded
    assert not loaded & (_HEAVY - {"icecore.api"})


def test_importing_icecore_loads_nothing_heavy() -> None:
    code = "import sys, icecore; print(*sorted(n for n in sys.modules if n.startswith('icecore.') or n in HEAVY))"
    heavy = "HEAVY = {'numpy', 'msgspec', 'zstandard', 'rich', 'numcodecs', 'google.protobuf', 'asyncio'}\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", heavy + code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= GROUND


def test_formats_do_no_io_and_backends_know_no_format() -> None:
    names = frozenset(module.name for module in modules())
    wrong = []
    for module in modules():
        for line, target in imports(module, names):
            where = f"{module.path.relative_to(ROOT)}:{line}"
            if module.name.startswith(FORMATS) and (
                target.split(".")[0] in DOES_IO or target.startswith(BACKENDS)
            ):
                wrong.append(f"{where}: a format module imports {target}")
            if module.name in PLAIN_BACKENDS and target.startswith(FORMATS):
                wrong.append(f"{where}: a backend imports the format {target}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(module.path.relative_to(ROOT))
        for module in modules()
        if not ast.get_docstring(parsed(module.path))
    ]
    assert not silent


def test_the_core_never_prints_and_keeps_no_global_state() -> None:
    wrong = []
    for module in modules():
        for node in ast.walk(parsed(module.path)):
            where = f"{module.path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Global):
                wrong.append(f"{where}: global {', '.join(node.names)}")
            prints = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
            )
            if prints and module.floor != "face":
                wrong.append(f"{where}: print()")
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_package() -> None:
    """Otherwise it would not be installed."""
    folders = {
        path.parent
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert [
        str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()
    ] == []


@pytest.mark.parametrize("name", ["store", "dumper", "restorer"])
def test_the_main_folders_stand_at_the_top(name: str) -> None:
    assert (ROOT / name).resolve() == PACKAGE / name and (ROOT / name).readlink() == Path(
        "icecore"
    ) / name


def test_the_top_level_holds_the_ground_floor_and_the_ways_in() -> None:
    """Everything else has a package, so that the listing of the package is its architecture."""
    entries = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    ground = {name.split(".")[1] for name in GROUND} - {"config"}
    assert entries == ground | {"__main__", "api", "cli", "worker", "zygote"}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == {
        "config",
        *FLOORS,
        *LIBRARY - {"api"},
        *FACE - {"__main__", "cli", "worker", "zygote"},
    }


def room(name: str) -> str:
    """Return the sub-package of a module. The packages of library and face have none, so each of
    them is one; on the other floors, a module directly on the floor is its own sub-package.
    """
    parts = name.split(".")
    if len(parts) > 2 and parts[1] in LIBRARY | FACE:
        return ".".join(parts[:2])
    return ".".join(parts[:3]) if len(parts) > 3 else name


def test_no_circle_among_sub_packages() -> None:
    """Imports inside functions count too. The modules of a floor can be read from the bottom up."""
    names = frozenset(module.name for module in modules())
    needs: dict[str, set[str]] = {}
    for module in modules():
        for _, target in imports(module, names):
            if (
                target in names
                and room(target) != room(module.name)
                and module.name != "icecore"  # it loads names of all of them on their first use
            ):
                needs.setdefault(room(module.name), set()).add(room(target))
    order = TopologicalSorter(needs)
    order.prepare()  # raises CycleError, which names the cycle


def test_the_installed_package_is_the_tree() -> None:
    """Every file of the tree is installed with the same content, so the tests cover what is here."""
    spec = importlib.util.find_spec("icecore")
    assert spec is not None and spec.origin is not None
    place = Path(spec.origin).parent
    files = [
        path.relative_to(PACKAGE)
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".so", ".o"}
    ]
    programs = {"icecore-init", "icecore-keeper"}  # built in the tree by an editable installation
    stale = [
        str(file)
        for file in files
        if file.name not in programs and not same(PACKAGE / file, place / file)
    ]
    assert files and not stale, (
        f"not installed as they are in the tree: {stale}; 'make test' installs anew (see package-data)"
    )


def same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()

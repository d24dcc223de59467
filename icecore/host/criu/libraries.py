"""The libraries that CRIU gets preloaded, and the environments that name them.

The guard of a dump imports this module: one process for each dump, so the module imports little.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from icecore.errors import MissingTool, UsageError

#: What CRIU gets preloaded when it dumps, and when it restores; not there where the build found no
#: compiler.
CRIU_LIBRARY = Path(__file__).with_name("libicecore-criu.so")
RESTORE_LIBRARY = Path(__file__).with_name("libicecore-restore.so")
_HIDDEN, _FACTS, _HOLD = "ICECORE_HIDDEN", "ICECORE_KERNEL_FACTS", "ICECORE_HOLD"
#: Where CRIU keeps the results of its kernel probes if it cannot use /run/criu.kdat.
_FACTS_FOLDER = Path("/run/icecore/criu")
_UNFINISHED_SECONDS = 60.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CGROUPS, _GROUP, _KEYRING = "ICECORE_CGROUPS", "ICECORE_GROUP", "ICECORE_KEYRING"
_NAMES = "ICECORE_NAMES"


def dump_environment(hidden: str | None, hold: str = "") -> dict[str, str]:
    """Return the environment of a CRIU that dumps. If its library was built, CRIU does not copy
    what need not be copied (icecore/host/criu/memcpy.c) nor put memory into pipes
    (icecore/host/criu/pages.c), stays out of the job's working directory
    (icecore/host/criu/proc.c), remembers what the kernel can do (icecore/host/criu/facts.c), takes
    smaps from copies (icecore/host/criu/mappings.c), knows how mapped files were opened
    (icecore/host/criu/map_files.c), does not look for tracked connections where there are none
    (icecore/host/criu/conntrack.c), starts its action script once (icecore/host/criu/scripts.c),
    and lets all threads go together (icecore/host/criu/release.c).

    Without it a window is longer by some 7 ms for each GiB of addresses that its processes have
    reserved, and by some 45 ms for each GiB of small pages that they use. Dumps of two jobs at the
    same time can fail. So can the restore of a job that mapped a file at addresses where an earlier
    snapshot found another file. A stopped process that gets SIGCONT right after a window can stay
    stopped.

    Args:
        hidden: Path of a file for what CRIU is kept from seeing (`icecore.host.criu.hidden`); None:
            it sees everything.
        hold: Path of the action script that is only for the stage ``pre-dump``
            (icecore/host/criu/scripts.c); empty: there is none.
    """
    ours = (_HIDDEN, _FACTS, _HOLD)
    given = {name: value for name, value in os.environ.items() if name not in ours}
    if not CRIU_LIBRARY.exists():
        return given
    wanted = {} if hidden is None else {_HIDDEN: hidden}
    if hold:
        wanted[_HOLD] = hold
    return given | wanted | _preloading(CRIU_LIBRARY)


def restore_environment(
    cgroups: Sequence[str] = (),
    group: Path | None = None,
    *,
    own_keyring: bool = False,
    names: str = "",
) -> dict[str, str]:
    """Return what CRIU's environment needs besides ours for a restore: if it was built, a library
    that treats a thread killed while others run as one that was detached
    (icecore/host/criu/detach.c), and makes processes set their POSIX locks again
    (icecore/host/criu/locks.c), among other things. Without it a restore fails if a process of the
    job ends another, or its own threads, while CRIU detaches them, and POSIX locks of mapped files
    are lost.

    Args:
        cgroups: Files cgroup.procs of the groups that CRIU, and with it the tree, joins
            (icecore/host/criu/join.c).
        group: Directory of a cgroup that it joins after them if it can; None: none.
        own_keyring: The tree gets a session keyring of its own, because its user must not possess
            the keys of this process's.
        names: The rights with which CRIU makes names (icecore/host/criu/names.c); empty: root's.

    Raises:
        MissingTool: One of them is wanted and there is no library.
        UsageError: A path contains a newline, which separates them; a cgroup's name cannot.
    """
    if odd := [path for path in cgroups if "\n" in path]:
        raise UsageError(f"the cgroup of {odd[0]!r} cannot be joined: its path has several lines")
    wanted = {_CGROUPS: "\n".join(cgroups)} if cgroups else {}
    if own_keyring:
        wanted[_KEYRING] = "new"
    if names:
        wanted[_NAMES] = names
    if wanted and not RESTORE_LIBRARY.exists():
        raise MissingTool(
            "jobs of other users cannot be restored: CRIU's library was not built",
            cure="install gcc, then reinstall icecore",
        )
    if group is not None:
        wanted[_GROUP] = str(group / "cgroup.procs")
    return wanted | _preloading(RESTORE_LIBRARY)


def _preloading(library: Path) -> dict[str, str]:
    if not library.exists():
        return {}
    before = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library} {before}" if before else str(library), **_facts()}


def _facts() -> dict[str, str]:
    """Return the variable that names the directory for CRIU's kernel probes, and remove files of
    other boots and of a CRIU that was killed. The value is empty if the directory cannot be made or
    others control it.
    """
    try:
        if not _FACTS_FOLDER.parent.exists():
            _FACTS_FOLDER.parent.mkdir(parents=True)
            _FACTS_FOLDER.parent.chmod(0o755)  # whatever the umask: others find the service there
        _FACTS_FOLDER.mkdir(mode=0o700, exist_ok=True)
        if not all(map(_is_own_directory, (_FACTS_FOLDER, _FACTS_FOLDER.parent))):
            return {_FACTS: ""}
        boot = _BOOT.read_text().strip()
        for name in os.listdir(_FACTS_FOLDER):
            if not name.startswith(boot) or _was_left(_FACTS_FOLDER / name):
                (_FACTS_FOLDER / name).unlink(missing_ok=True)
    except OSError:
        return {_FACTS: ""}
    return {_FACTS: str(_FACTS_FOLDER)}


def _was_left(path: Path) -> bool:
    """Return whether it is an unfinished file, which has a pid after a dot, and nobody writes it any
    more: CRIU writes it at once.
    """
    try:
        return "." in path.name and time.time() - path.stat().st_mtime > _UNFINISHED_SECONDS
    except FileNotFoundError:
        return False  # it has its name now


def _is_own_directory(path: Path) -> bool:
    """Return whether it is a directory, not a link, of root's or this process's user."""
    about = os.lstat(path)
    return stat.S_ISDIR(about.st_mode) and about.st_uid in (0, os.geteuid())

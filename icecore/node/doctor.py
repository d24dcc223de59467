"""Checks of this machine for dumps and restores.

Nothing is changed, and every finding that is not good names its cure.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from icecore import units
from icecore.access import passphrase
from icecore.access.places import state_directory
from icecore.config import Config
from icecore.dumper.preflight.checks_gpu import LEAST_DRIVER
from icecore.errors import IcecoreError, MissingTool
from icecore.host.criu.hidden import hides
from icecore.host.criu.libraries import CRIU_LIBRARY, RESTORE_LIBRARY
from icecore.host.criu.program import SOCKETS_PLUGIN, find_criu
from icecore.host.cuda import holder
from icecore.host.cuda.driver import EXTRA_CURE, has_bindings
from icecore.host.gpu.backend import find_backend
from icecore.host.jobs import namespaces
from icecore.host.jobs.gpu import private_root_lack
from icecore.host.kernel import freezer, limits, oom, procfs
from icecore.host.kernel.scanning import native_scan_lacks
from icecore.host.kernel.userfaultfd import create
from icecore.host.resident.keeper import keeper_path, preload_path
from icecore.repository import Repository
from icecore.sizes import PAGE

State = Literal["good", "warning", "bad"]
_LEAST_KERNEL = (5, 11)
_SCAN_KERNEL = (6, 7)
_NEEDED = ("CAP_SYS_ADMIN", "CAP_SYS_PTRACE")
#: To start jobs of other users, and to dump and restore them.
_FOR_OTHERS = (
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"),
    *("CAP_SETPCAP", "CAP_SYS_NICE"),
)
_ROOM = 1 << 30


class Finding(msgspec.Struct, frozen=True):
    """One finding: what was examined, its state, what was found, and the cure."""

    name: str
    state: State
    message: str
    cure: str = ""


def examine(config: Config, location: str) -> Iterator[Finding]:
    """Examine this machine and the repository at ``location``.

    Yields findings one by one, because some checks take a second.
    """
    yield from _platform()
    yield from _privileges()
    yield from _criu(config)
    yield _scanning()
    yield _pipes(config)
    yield _io_uring()
    yield from _gpus()
    yield _workdir(config.restore.workdir or config.dump.workdir)
    yield _jobs(config)
    yield from _saved_files(config)
    yield from _repository(config, location)


def _platform() -> Iterator[Finding]:
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    yield Finding("python", "good", f"{python} in {sys.prefix}")
    machine = platform.machine()
    known = machine == "x86_64"
    yield Finding(
        "architecture",
        "good" if known else "warning",
        machine,
        "" if known else "only x86_64 is tested",
    )
    version, release = limits.kernel_version(), os.uname().release
    if version < _LEAST_KERNEL:
        yield Finding("kernel", "bad", f"{release} is older than 5.11", "use a newer kernel")
    elif version < _SCAN_KERNEL:
        yield Finding(
            "kernel",
            "warning",
            f"{release} has no PAGEMAP_SCAN (6.7): finding pages is slower",
            "use a newer kernel",
        )
    else:
        yield Finding("kernel", "good", release)
    pages = limits.huge_pages()
    yield Finding(
        "huge pages",
        "warning" if pages == "never" else "good",
        f"transparent huge pages: {pages}",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" if pages == "never" else "",
    )


def _privileges() -> Iterator[Finding]:
    missing = [name for name in _NEEDED if name not in limits.capabilities()]
    if missing:
        yield Finding(
            "capabilities",
            "bad",
            f"{', '.join(missing)} missing",
            "run as root, in a container with --privileged",
        )
    else:
        yield Finding("capabilities", "good", "CAP_SYS_ADMIN, CAP_SYS_PTRACE")
    if "CAP_SYS_RESOURCE" in limits.capabilities():
        yield Finding(
            "OOM killer", "good", "spares CRIU and its guards, which run with oom_score_adj -1000"
        )
    else:
        message = "CAP_SYS_RESOURCE missing: the OOM killer may kill CRIU during a dump, which can lose the job"
        yield Finding("OOM killer", "warning", message, oom.CURE)
    yield _freezer()
    yield _other_users()
    try:
        os.close(create())
    except (OSError, IcecoreError) as error:
        yield Finding(
            "userfaultfd",
            "bad",
            f"cannot be used: {error}",
            "run as root, or sysctl -w vm.unprivileged_userfaultfd=1",
        )
    else:
        yield Finding("userfaultfd", "good", "available, with the events that a restore needs")


def _freezer() -> Finding:
    """Return whether jobs can have cgroups of their own, by making one."""
    name, without = (
        "freezer",
        "a dump of a job that starts processes all the time may take several attempts",
    )
    group = freezer.make_group(f"doctor-{os.getpid()}")
    if group is None:
        return Finding(
            name,
            "warning",
            f"no cgroup can be made for a job: {without}",
            "mount cgroups of version 2 writable (in a container: --cgroupns=host, or --privileged)",
        )
    freezer.remove_group(group)
    if not CRIU_LIBRARY.exists():
        return Finding(
            name,
            "warning",
            f"the library that freezes cgroups was not built: {without}",
            "install gcc, then reinstall icecore",
        )
    return Finding(name, "good", f"jobs get a cgroup of their own in {group.parent}")


def _other_users() -> Finding:
    """Check what jobs of other users need, and what they lose."""
    have = limits.capabilities()
    missing = [name for name in _FOR_OTHERS if name not in have]
    if missing:
        message = f"{', '.join(missing)} missing: jobs of other users cannot be started or restored"
        return Finding("other users", "warning", message, f"run as root with {', '.join(missing)}")
    if "CAP_SYS_RESOURCE" in have:
        return Finding("other users", "good", "root can start, dump and restore their jobs")
    if not CRIU_LIBRARY.exists():
        message = "CAP_SYS_RESOURCE missing, and no C compiler was there to do without: jobs of other users cannot be dumped"
        return Finding("other users", "warning", message, oom.CURE)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)[::-1]
    message = (
        "CAP_SYS_RESOURCE missing: their jobs can be started, dumped and restored, but with no higher"
        f" limits than icecore has ({files} open files, for example)"
    )
    return Finding("other users", "warning", message, oom.CURE)


def _criu(config: Config) -> Iterator[Finding]:
    try:
        criu = find_criu(config.criu or None)
        criu.check()
    except IcecoreError as error:
        yield Finding("CRIU", "bad", error.message, error.cure)
        return
    version = ".".join(map(str, criu.version))
    yield Finding("CRIU", "good", f"{version} at {criu.path}; 'criu check' passes")
    if not all(built.exists() for built in (CRIU_LIBRARY, RESTORE_LIBRARY, SOCKETS_PLUGIN)):
        message = "built without a C compiler: windows are longer by 7 ms per GiB of address space that a job reserves (GPU jobs reserve 100 GiB and more)"
        message += " and by about 45 ms per GiB of small pages that it uses; and a restore fails if processes kill others while CRIU releases them"
        message += (
            "; and jobs that are connected to unix sockets of other processes cannot be dumped"
        )
        yield Finding("CRIU's library", "warning", message, "install gcc, then reinstall icecore")


def _scanning() -> Finding:
    lacks = native_scan_lacks()
    if not lacks:
        return Finding("scanning", "good", "memory is read and fingerprinted by native code")
    cure = (
        "install gcc, then reinstall icecore"
        if "XXH3" not in lacks
        else "pip install --force-reinstall --only-binary=xxhash xxhash, or install libxxhash0"
    )
    return Finding(
        "scanning",
        "warning",
        f"by the Python interpreter, which is slower on many cores: {lacks}",
        cure,
    )


def _pipes(config: Config) -> Finding:
    """Check how large a process may be: CRIU holds the pages of a frozen process in pipes, unless
    they are hidden from it.
    """
    with suppress(IcecoreError):
        if hides(find_criu(config.criu or None)):
            return Finding(
                "pipes",
                "good",
                "sufficient for jobs of any size: CRIU needs them only for small mappings",
            )
    descriptors, capacity = limits.descriptor_limit(), limits.pipe_capacity()
    most = max(0, (descriptors - limits.pipe_need(0)) // 2) * capacity
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    message = f"fs.pipe-max-size {limits.pipe_max_size()}, {descriptors} descriptors: jobs of up to {units.size(most)}"
    if most >= total:
        return Finding("pipes", "good", message)
    cure = "sysctl -w fs.pipe-max-size=134217728"
    if limits.pipe_capacity() >= limits.CRIU_PIPE_PAGES * PAGE:
        cure = "raise the hard limit of descriptors: ulimit -Hn 1048576"
    return Finding("pipes", "warning", f"{message}, of {units.size(total)} in this machine", cure)


def _io_uring() -> Finding:
    disabled = limits.io_uring_disabled()
    if disabled == 2:
        return Finding("io_uring", "good", "off: no job can use it")
    return Finding(
        "io_uring",
        "warning",
        "on: CRIU cannot dump a job that uses it ('icecore run' denies it to its jobs)",
        "sysctl -w kernel.io_uring_disabled=2",
    )


def _gpus() -> Iterator[Finding]:
    """Check the driver, its bindings, and the machine's support for GPU jobs."""
    backend = find_backend()
    if not backend.present:
        yield Finding("GPUs", "good", "no NVIDIA driver; only GPU jobs need one")
        return
    try:
        inventory = backend.inventory()
    except IcecoreError as error:
        yield Finding("GPUs", "bad", error.message, error.cure)
        return
    names = ", ".join(
        f"{count} x {name}" for name, count in Counter(gpu.name for gpu in inventory.gpus).items()
    )
    words = f"{names}, driver {inventory.driver}"
    if inventory.branch < LEAST_DRIVER:
        yield Finding(
            "GPUs",
            "bad",
            f"{words}, which cannot checkpoint",
            f"install driver {LEAST_DRIVER} or newer",
        )
    elif any(gpu.mig for gpu in inventory.gpus):
        yield Finding(
            "GPUs",
            "warning",
            f"{words}; GPUs in MIG mode cannot be checkpointed",
            "nvidia-smi -mig 0",
        )
    else:
        yield Finding("GPUs", "good", words)
    if backend.world is None and not has_bindings():
        yield Finding("cuda.bindings", "bad", "not installed", EXTRA_CURE)
    if not holder.PLUGIN.exists():
        yield Finding("CRIU's plugin", "bad", *holder.LACK)
    try:
        preload_path()
        keeper_path()
        yield Finding(
            "resident memory", "good", "GPU jobs keep their device memory in place (run --gpu)"
        )
    except MissingTool as error:
        yield Finding("resident memory", "warning", error.message, error.cure)
    lack = private_root_lack()
    yield Finding(
        "private root",
        "warning" if lack else "good",
        f"not available: {lack}" if lack else "available: GPU jobs get their own /proc",
        "run in a container that allows mounts; otherwise a snapshot of a GPU job can be restored only once at a time"
        if lack
        else "",
    )


def _workdir(path: str) -> Finding:
    path = path or "/dev/shm"
    try:
        free = limits.free_space(path)
        kind = _filesystem(path)
    except OSError as error:
        return Finding(
            "workdir",
            "bad",
            f"{path}: {error.strerror}",
            "name another directory: workdir in [dump] and [restore]",
        )
    if kind != "tmpfs":
        return Finding(
            "workdir",
            "warning",
            f"{path} is on {kind}, which lengthens the window",
            "name a directory on tmpfs: workdir in [dump]",
        )
    if free < _ROOM:
        return Finding(
            "workdir",
            "warning",
            f"{path} has {units.size(free)} free",
            f"mount -o remount,size=50% {path}",
        )
    return Finding("workdir", "good", f"{path}: tmpfs, {units.size(free)} free")


def _filesystem(path: str) -> str:
    """Return the type of the file system that contains ``path``."""
    wanted = os.path.realpath(path)
    best, kind = "", "unknown"
    for mount in procfs.mounts():
        point = mount.point
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, mount.kind
    return kind


def _jobs(config: Config) -> Finding:
    state = state_directory(config.state)
    try:
        namespaces.init_program()
    except IcecoreError as error:
        return Finding("jobs", "bad", error.message, error.cure)
    nearest = next(path for path in (state, *state.parents) if path.is_dir())
    if not os.access(nearest, os.W_OK):
        return Finding(
            "jobs", "bad", f"{state} is not writable", "run as root, or set ICECORE_STATE"
        )
    if os.statvfs(nearest).f_flag & os.ST_NOEXEC:
        return Finding(
            "jobs",
            "bad",
            f"{state} is on a file system mounted noexec",
            "set ICECORE_STATE to another place",
        )
    return Finding("jobs", "good", f"recorded in {state}")


def _saved_files(config: Config) -> Iterator[Finding]:
    """Find files of jobs that restores saved and could not put back."""
    folder = state_directory(config.state) / "restores"
    kept = sorted(folder.glob("*.kept")) if os.access(folder, os.R_OK) else []
    for one in kept:
        message = f"{one} contains files of a job that a restore replaced and could not put back"
        yield Finding("restores", "warning", message, f"take what you need, then 'rm -r {one}'")


def _repository(config: Config, location: str) -> Iterator[Finding]:
    if not location:
        yield Finding(
            "repository",
            "warning",
            "none is named",
            "-r DIR, ICECORE_REPOSITORY, or repository in icecore.toml",
        )
        return
    try:
        with Repository.open(
            location, passphrase=passphrase.current(config), state=config.state, config=config
        ) as repository:
            count = len(repository.snapshots())
            where = repository.location
    except (IcecoreError, OSError) as error:
        cure = error.cure if isinstance(error, IcecoreError) else "check its permissions"
        yield Finding("repository", "bad", str(getattr(error, "message", error)), cure)
        return
    words = f"{where}: {count} snapshots"
    if not Path(where).is_dir():
        yield Finding("repository", "good", words)
        return
    # access(2) covers both permissions and read-only mounts, which stop even root.
    if os.access(where, os.W_OK | os.X_OK) and os.access(f"{where}/log", os.W_OK | os.X_OK):
        yield Finding("repository", "good", words)
    else:
        cure = "mount it writable, or run as its owner; restore, export, copy, sync, check and stats can read it with --read-only"
        yield Finding(
            "repository",
            "warning",
            f"{words}; it is not writable, so dump, forget and gc fail",
            cure,
        )
    free = limits.free_space(where)
    state: State = "good" if free >= _ROOM else "warning"
    yield Finding(
        "space",
        state,
        f"{units.size(free)} free in {where}",
        "" if state == "good" else "'icecore forget', then 'icecore gc'",
    )

"""The program that starts a job's init inside its namespaces. It runs alone (`python -I -S
launch.py`) and imports nothing of icecore.

A process of its own, because unshare, fork and pivot_root are not for a program with threads. The
protocol:

- standard input: one line of JSON (what `namespaces.Launch` holds); then, once the pid was noted
  down, a line ``go``. An end of file instead of it makes the child leave: no job runs that nobody
  knows of.
- standard output: ``{"pid": N, "permitted": …}``, the init's pid as the starter sees it, and why
  io_uring could not be denied (empty: no failure); then, if something failed, ``{"step": …,
  "errno": …, "error": …}`` or the init's own ``{"exec_errno": N}``. Its end means that the command
  runs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = (
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
    1 << 19,
)
MNT_DETACH = 2
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW = 1, 4
SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO = 0x7FFF0000, 0x00050000
BPF_LD_W_ABS, BPF_ALU_AND_K, BPF_JMP_JEQ_K, BPF_RET_K = 0x20, 0x54, 0x15, 0x06
#: io_uring_setup has this number on every architecture; x32 adds a bit.
IO_URING_SETUP, X32_BIT = 425, 0x40000000
KEYCTL_JOIN_SESSION_KEYRING = 1
#: keyctl, ioprio_set, capset, by machine.
CALLS = {"x86_64": (250, 251, 126), "aarch64": (219, 30, 91)}
SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}
#: f_type of statfs(2): cgroup version 1 and 2.
CGROUP_MAGICS = (0x27E0EB, 0x63677270)
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
#: Descriptors of the init: how the command ended, and what fails before it runs.
_STATUS, _REPORT = 3, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]


class StepFailed(Exception):
    """One step failed; ``error`` is the system's answer."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(f"{step}: {error.strerror}")
        self.step = step
        self.error = error


def _checked(result: int, step: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise StepFailed(step, OSError(number, os.strerror(number)))


def unshare(flags: int) -> None:
    """Give the calling thread (for pid namespaces: its later children) new namespaces (unshare(2))."""
    _checked(_libc.unshare(flags), "making the namespaces")


def enter(namespace: int, kind: int) -> None:
    """Move the calling thread into a namespace (setns(2))."""
    _checked(_libc.setns(namespace, kind), "entering the namespace")


def mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    """mount(2)."""
    _checked(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() if kind is not None else None,
            flags,
            options.encode() if options is not None else None,
        ),
        f"mounting {source} on {target}",
    )


def raise_loopback() -> None:
    """Bring up ``lo`` in the network namespace of the calling thread: a fresh one has it down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        request = struct.pack("16sh22x", b"lo", 0)
        flags: int = struct.unpack_from("h", fcntl.ioctl(control, SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))


def cover(binds: Iterable[Sequence[str]]) -> None:
    """Bind directories over others, each ``(directory, mount point)``, in the calling thread's mount
    namespace, which must be its own. Set-ID bits and device files have no effect there.

    Later mounts and unmounts outside are visible inside too (propagation ``slave``).
    """
    mount("none", "/", None, MS_REC | MS_SLAVE)
    for source, point in binds:
        _bind_private(source, point)


def _bind_private(source: str, point: str) -> None:
    mount(source, point, None, MS_BIND)
    mount("none", point, None, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV)


def bind_root(root: str) -> None:
    """Make ``root`` a mount of the host's root alone, in the calling thread's mount namespace,
    which must be its own.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)  # nothing of this reaches the host
    mount("/", root, None, MS_BIND)


def _enter_root(
    root: str, binds: list[list[str]], private: list[list[str]], covers: list[list[str]]
) -> None:
    """Move into the private root: the host's root, its ``[source, mount point]`` binds and covers
    (see `cover`), and fresh ``[mount point, type, options]``.

    pivot_root(2) in the form with one directory: the old root ends up on top of the new one, and is
    let go of.
    """
    bind_root(root)
    for source, point in binds:
        mount(source, root + point, None, MS_BIND)
    for source, point in covers:
        _bind_private(source, root + point)
    for point, kind, options in private:
        flags = (
            MS_NOSUID
            | (0 if kind == "devpts" else MS_NODEV)
            | (0 if kind == "tmpfs" else MS_NOEXEC)
        )
        mount(kind, root + point, kind, flags, options)
    os.chdir(root)
    _checked(_libc.pivot_root(b".", b"."), "changing to the private root")
    _checked(_libc.umount2(b".", MNT_DETACH), "letting go of the old root")


def _open_log(path: str) -> int:
    return os.open(
        path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )


def _default_signals() -> None:
    """Reset the handling of every signal, also of 32 and 33, which the C library hides from its
    callers but which may be inherited ignored.
    """
    call = 13 if os.uname().machine == "x86_64" else 134  # rt_sigaction
    default = ctypes.create_string_buffer(
        32
    )  # struct sigaction as the kernel has it: SIG_DFL, no flags, no mask
    for number in range(1, 65):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            _checked(
                _libc.syscall(
                    ctypes.c_long(call), ctypes.c_int(number), default, None, ctypes.c_size_t(8)
                ),
                f"default handling of signal {number}",
            )


def join_cgroups(files: list[str]) -> None:
    """Move this process into groups (cgroups(7)), each named by its file cgroup.procs."""
    for path in files:
        try:
            group = _open_group(path)
            try:
                os.write(group, b"0\n")
            finally:
                os.close(group)
        except OSError as error:
            raise StepFailed(f"joining the cgroup {os.path.dirname(path)}", error) from error


def _join_own(path: str) -> None:
    """Move this process into the cgroup of its job's own. Where the kernel refuses, the job runs
    without one: only its dumps take longer.
    """
    try:
        join_cgroups([path])
    except StepFailed:
        pass


def _open_group(path: str) -> int:
    """Open a file cgroup.procs for writing. Users name groups: nothing else is ever written to."""
    refused = OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    if not path.startswith("/") or os.path.basename(path) != "cgroup.procs":
        raise refused
    group = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    about = ctypes.create_string_buffer(512)  # struct statfs, which begins with a long f_type
    if (
        _libc.fstatfs(ctypes.c_int(group), about) != 0
        or ctypes.c_long.from_buffer(about).value not in CGROUP_MAGICS
    ):
        os.close(group)
        raise refused
    return group


def deny_io_uring() -> str:
    """Make io_uring_setup(2) fail with EPERM in this process and all that it starts (seccomp(2)),
    as in containers: CRIU cannot dump rings, and programs can do without them.

    Return why that failed; empty: it did not.
    """
    machine = os.uname().machine
    if machine not in SECCOMP_CALL:
        return f"the number of seccomp(2) on {machine} is not known"
    code = (
        (BPF_LD_W_ABS, 0, 0, 0),  # seccomp_data.nr
        (BPF_ALU_AND_K, 0, 0, ~X32_BIT & 0xFFFFFFFF),
        (BPF_JMP_JEQ_K, 0, 1, IO_URING_SETUP),
        (BPF_RET_K, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM),
        (BPF_RET_K, 0, 0, SECCOMP_RET_ALLOW),
    )
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(instructions))
    result = _libc.syscall(
        ctypes.c_long(SECCOMP_CALL[machine]),
        ctypes.c_uint(SECCOMP_SET_MODE_FILTER),
        # Without this flag kernels before 5.16 slow the process down (speculative store bypass).
        ctypes.c_uint(SECCOMP_FILTER_FLAG_SPEC_ALLOW),
        program,
    )
    return "" if result == 0 else os.strerror(ctypes.get_errno())


def _drop_bounding(kept: int) -> None:
    """Drop the capabilities that are not kept from the bounding set: no file can give them."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for number in range(last + 1):
        if not kept >> number & 1:
            _checked(_libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0), f"dropping capability {number}")


def become_user(identity: dict[str, Any]) -> None:
    """Give this process the identity of another user for good: nothing of root's is left.

    What needs privileges comes first, the user last.
    """
    keyctl, ioprio_set, capset = map(ctypes.c_long, CALLS[os.uname().machine])
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(f"{identity['oom_score_adj']}\n")
    except OSError as error:  # only CAP_SYS_RESOURCE can lower it: the higher one is kept
        if error.errno != errno.EACCES:
            raise StepFailed("setting oom_score_adj", error) from error
    policy, priority = identity["scheduling"]
    if identity["cpus"]:
        os.sched_setaffinity(0, identity["cpus"])
    os.sched_setscheduler(0, policy, os.sched_param(priority))
    os.setpriority(os.PRIO_PROCESS, 0, identity["nice"])
    if identity["io_priority"]:
        _checked(
            _libc.syscall(ioprio_set, 1, 0, ctypes.c_int(identity["io_priority"])),
            "setting its priority",
        )
    for number, soft, hard in identity["limits"]:
        resource.setrlimit(number, (soft, hard))
    _drop_bounding(identity["bounding"])
    os.setgroups(identity["groups"])
    os.setresgid(identity["group"], identity["group"], identity["group"])
    os.setresuid(identity["user"], identity["user"], identity["user"])
    if identity["user"]:
        # setresuid(2) clears the others, not the inheritable ones.
        header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
        _checked(_libc.syscall(capset, header, none), "dropping capabilities")
    # The session keyring of root may hold keys of root's, which its members possess.
    if _libc.syscall(keyctl, KEYCTL_JOIN_SESSION_KEYRING, None) < 0:
        number = ctypes.get_errno()
        if number != errno.ENOSYS:
            raise StepFailed("making a session keyring", OSError(number, os.strerror(number)))
    if identity["no_new_privs"]:
        _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "setting no_new_privs")


def find_program(name: str, path: str) -> str:
    """Return the path of a program that this process may execute, as a shell looks it up.

    Raises:
        OSError: There is none (ENOENT), or only some that it may not execute (EACCES).
    """
    if "/" in name:
        return name
    number = errno.ENOENT
    for directory in path.split(":"):
        candidate = os.path.join(directory or ".", name)
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            number = errno.EACCES
    raise OSError(number, os.strerror(number))


def _settle(launch: dict[str, Any]) -> None:
    """Enter the working directory."""
    try:
        os.chdir(launch["cwd"])
    except OSError as error:
        raise StepFailed("entering the working directory", error) from error
    os.umask(launch["umask"])


def _become_command(launch: dict[str, Any]) -> NoReturn:
    """Become the command of a job of another user.

    None of the job's paths is looked up with rights that the user lacks, and nothing that this
    process has open outlives its exec, except /dev/null and the logs.
    """
    os.setpgid(0, 0)  # a kill(0) of the command's must not reach its init
    try:
        become_user(launch["identity"])
    except OSError as error:
        raise StepFailed(f"becoming user {launch['identity']['user']}", error) from error
    _settle(launch)
    environment: dict[str, str] = launch["environment"]
    name, *arguments = launch["command"]
    _default_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        program = find_program(name, environment.get("PATH", os.defpath))
        os.execve(
            os.fsencode(program),
            [os.fsencode(word) for word in arguments],
            {os.fsencode(key): os.fsencode(value) for key, value in environment.items()},
        )
    except OSError as error:
        _say(_REPORT, exec_errno=error.errno)
        os._exit(127 if error.errno == errno.ENOENT else 126)


def _fork_command(launch: dict[str, Any]) -> int:
    """Fork the command of a job of another user off its init, which stays root's: the user can
    neither end nor trace it, it can end whatever the job leaves behind, and CRIU can have it mount
    a /proc.

    Return the command's pid as the init sees it.
    """
    if "pid" not in launch["namespaces"]:
        _checked(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "becoming a subreaper")
    signal.pthread_sigmask(
        signal.SIG_SETMASK, signal.valid_signals()
    )  # until the init handles them
    child = os.fork()
    if child:
        return child
    try:
        _become_command(launch)
    except (OSError, StepFailed) as error:
        _say_error(_REPORT, error)
    finally:
        os._exit(126)


def _become_init(launch: dict[str, Any]) -> NoReturn:
    """Become the job's first process (pid 1 if it has a pid namespace)."""
    if launch["root"] is not None:
        _enter_root(launch["root"], launch["binds"], launch["private"], launch["covers"])
    elif launch["covers"]:
        cover(launch["covers"])
    os.setsid()
    # Opened in here: a descriptor from outside belongs to a mount that CRIU does not find in this
    # namespace.
    opened = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)]
    opened += [_open_log(launch[name]) for name in ("stdout", "stderr", "status")]
    if launch["identity"] is None:
        _settle(launch)
    else:
        for log in opened[1:3]:  # so that the job can open /dev/stdout
            os.fchown(log, launch["identity"]["user"], -1)
    if os.read(0, 1) != b"g":
        os._exit(0)  # the starter is gone
    # Raised first above where they go, so that no dup2 overwrites one that is still needed. The
    # init marks 3 and 4 close-on-exec.
    wanted = (*opened, _REPORT)
    raised = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in wanted]
    for target, source in enumerate(raised):
        os.dup2(source, target, inheritable=target < 3)
    os.closerange(_REPORT + 1, os.sysconf("SC_OPEN_MAX"))
    arguments, environment = launch["command"], launch["environment"]
    if launch["identity"] is not None:
        arguments, environment = ["-", str(_fork_command(launch))], {}
    else:
        _default_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.set_inheritable(_STATUS, True)
    os.set_inheritable(_REPORT, True)
    words = [b"icecore-init", b"%d" % _STATUS, b"%d" % _REPORT, *map(os.fsencode, arguments)]
    variables = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    for _ in range(100):
        try:
            os.execve(launch["init"], words, variables)
        except OSError as error:
            if error.errno != errno.ETXTBSY:
                raise
            # A child that another thread of the starter forked may still hold the file open for
            # writing, until it executes.
            time.sleep(0.01)
    raise OSError(errno.ETXTBSY, os.strerror(errno.ETXTBSY), launch["init"])


def _say(fd: int, **answer: object) -> None:
    os.write(fd, json.dumps(answer).encode() + b"\n")


def _say_error(fd: int, error: OSError | StepFailed) -> None:
    step, cause = (
        (error.step, error.error) if isinstance(error, StepFailed) else ("starting the init", error)
    )
    text = os.strerror(cause.errno or 0) + (f": {cause.filename}" if cause.filename else "")
    _say(fd, step=step, errno=cause.errno, error=text)


def _read_line(fd: int) -> bytes:
    """Read one line and not a byte more: the rest is for the child."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(fd, 65536)
        if not piece:
            break
        line += piece
    return bytes(line)


def main() -> int:
    """Read the launch, make the namespaces, fork the init into them, say its pid, leave it."""
    launch = json.loads(_read_line(0))
    report = 1
    flags = {
        "pid": CLONE_NEWPID,
        "ipc": CLONE_NEWIPC,
        "network": CLONE_NEWNET,
        "mount": CLONE_NEWNS,
    }
    try:
        if launch["identity"] is not None:
            join_cgroups(launch["identity"]["cgroups"])
        if launch["group"] is not None:
            _join_own(launch["group"])
        unshare(sum(flags[name] for name in launch["namespaces"]))
        if "network" in launch["namespaces"]:
            raise_loopback()
        permitted = "" if launch["io_uring"] else deny_io_uring()
    except (OSError, StepFailed) as error:
        _say_error(report, error)
        return 1
    child = os.fork()
    if child:
        _say(report, pid=child, permitted=permitted)
        return 0
    os.dup2(report, _REPORT)
    try:
        _become_init(launch)
    except (OSError, StepFailed) as error:
        _say_error(_REPORT, error)
        os._exit(126)


if __name__ == "__main__":
    sys.exit(main())

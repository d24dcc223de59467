"""Explain CRIU's failures from its log: the first errors, and the cause and cure of known ones. The
first error counts: the others follow from it.
"""

from __future__ import annotations

import re

import msgspec

_ERROR_LINE = re.compile(r"^(?:\(\d+\.\d+\)\s*)?(?:pie: )?(?:\s*\d+:\s*)?Error \(([^)]*)\): (.*)$")
#: Logged as errors by dumps and restores that succeed.
_HARMLESS = re.compile(
    r"rlimit: Can't setup RLIMIT_NOFILE for self|Can't open (?:dir )?cgroup|Unable to set TCP_CORK"
)


class Cause(msgspec.Struct, frozen=True):
    """A known cause of CRIU's failure: ``name`` for programs, ``message`` and ``cure`` for people."""

    name: str
    message: str
    cure: str


class Diagnosis(msgspec.Struct, frozen=True):
    """``errors``: CRIU's own error lines, in order. ``cause``: their known cause, or None."""

    errors: list[str]
    cause: Cause | None

    def sentence(self, what: str) -> tuple[str, str]:
        """Return the message and the cure of an exception; ``what`` is what failed ("the dump of
        process 7").
        """
        first = self.errors[0] if self.errors else "CRIU gave no reason"
        if self.cause is None:
            return f"{what} failed: {first}", ""
        return f"{what} failed: {self.cause.message}; CRIU said: {first}", self.cause.cure


_PIPES_CURE = (
    "run 'sysctl -w fs.pipe-max-size=4194304' or raise the limit on open files (ulimit -n)"
)

#: Name of the cause of a dump that fails because processes or threads come and go meanwhile.
RESTLESS = "ended"

#: Name of the cause of a dump that fails because a connection waits for accept(2). The error line
#: ends with the inode of the socket.
UNACCEPTED = "unaccepted"

#: Name of the cause of a dump that fails because a process has started to use a GPU: CRIU started
#: without the plugin that handles the driver's devices.
BEGUN_GPU = "gpu-begun"

#: Name of the cause of a restore that fails because another process has an id of the tree.
PID_TAKEN = "pid-taken"

#: Pattern in an error line, and what it means. The first match of the earliest line counts.
KNOWN: list[tuple[re.Pattern[str], Cause]] = [
    (re.compile(pattern), Cause(name, message, cure))
    for pattern, name, message, cure in [
        (
            r"io_uring",
            "io-uring",
            "a process uses io_uring, which CRIU cannot dump",
            "start the job with 'icecore run' without --io-uring, or after 'sysctl -w kernel.io_uring_disabled=2'",
        ),
        (
            r"Can't get rlimit",
            "limits",
            "CRIU may not read the limits of another user's process",
            "give icecore CAP_SYS_RESOURCE (in a container: --cap-add SYS_RESOURCE); or install gcc, then reinstall icecore, which then reads them elsewhere",
        ),
        (
            r"can't dump unprivileged task whose /proc",
            "proc",
            "the root of the tree has a pid namespace of its own, sees the /proc of another one, and may not mount its own",
            "start the job with 'icecore run --user', or with a /proc of its own (unshare --pid --fork --mount-proc)",
        ),
        (
            r"Can't get 1:(?:16|34) opt",
            "inet-sockets",
            "a process has an internet socket, which CRIU before 4.2 cannot dump on Linux 6.16 and newer",
            "install a newer CRIU: tools/install-criu --suite sid",
        ),
        (
            r"Can't make pipe for page-pipe",
            "descriptors",
            "CRIU ran out of descriptors for page pipes",
            _PIPES_CURE,
        ),
        (r"Too many open files", "descriptors", "CRIU ran out of descriptors", _PIPES_CURE),
        (
            r"No space left on device",
            "space",
            "no room for the image files",
            "free space in the directory of --workdir, or name another one",
        ),
        (
            r"[Cc]an't dump ghost file .* (?:increase limit|size)",
            "ghost-limit",
            "a deleted file that is still open is larger than the limit",
            "raise --ghost-limit",
        ),
        (
            r"Connected TCP socket",
            "tcp-established",
            "a process holds an established TCP connection",
            "have the job close it before the dump",
        ),
        (
            r"in-flight socket|In-flight connection \(l\)",
            UNACCEPTED,
            "a connection that the server has not accepted yet cannot be dumped",
            "try again; if that does not help, have the server accept its connections before the dump, or have its clients pause (--before)",
        ),
        (
            r"might require shell-job option|Found dangling tty|tty: Can't (?:find|open) master|can't find slave",
            "terminal",
            "a process is attached to a terminal outside the tree",
            "start the job without a terminal: 'icecore run' gives it none",
        ),
        (
            r"External socket is used|ext-unix-sk|Runaway unix|is not part of dumpee",
            "unix-peer",
            "a unix socket is connected to a process outside the tree",
            "make icecore's plugin for CRIU: install a C compiler, then icecore once more",
        ),
        (
            r"Some file locks are hold",
            "file-locks",
            "a process holds file locks",
            "have the job release them before the dump",
        ),
        (
            r"Can't lookup mount|Unable to (?:look ?up|find) mount|doesn't have a proper root mount",
            "mounts",
            "an open file lies on a mount that the job's mount namespace does not show",
            "have the job reopen the file; one that needs its own mounts: start it with 'icecore run --root private'",
        ),
        (
            r"(?:ip|nf)tables|[Nn]etwork lock|nft",
            "network-lock",
            "CRIU could not lock the network (iptables or nftables)",
            "install nftables (apt-get install nftables)",
        ),
        (
            r"Unable to connect to|task seized by|ptrace.*Operation not permitted|Can't seize.*not permitted",
            "traced",
            "a process of the tree is already traced, or may not be",
            "end the debugger or strace on it; 'icecore doctor' says whether CAP_SYS_PTRACE is missing",
        ),
        (
            r"Unable to detach \d+: No such process",
            "ended",
            "a process of the tree was killed before all of it ran",
            "look into the kernel's log (out of memory?), and try again",
        ),
        (
            r"Unable to detach from \d+: No such process|Can't seize|No such process"
            r"|Unseizable non-zombie|pid reused while suspending|found while seizing"
            r"|Zombie thread not supported|task not stopped after seize",
            "ended",
            "a process ended while the tree was being frozen",
            "try again",
        ),
        (
            r"Zombies with threads are not supported",
            RESTLESS,
            "the main thread of a process has ended (pthread_exit) while other threads run",
            "try again once that process has ended",
        ),
        (
            r"handle_device_vma plugin failed|of that type \[\d+\] \(chr 195:",
            BEGUN_GPU,
            "a process has started to use a GPU since the dump began",
            "dump it again",
        ),
        (
            r"Can't (?:dump|handle).*(?:of that type|device)|Can't dump file .* \[\d+\]|unsupported file",
            "file-type",
            "a process has an open file of a kind that CRIU cannot dump",
            "close it in the job before the dump",
        ),
        (
            r"Can't fork for \d+: File exists|Pid \d+ do(?:es)? not match expected|pid .* already in use"
            r"|Unable to create a thread: -17",
            PID_TAKEN,
            "a process id of the job is in use on this machine",
            "wait until the old processes are gone; jobs of 'icecore run --pid private' have process ids of their own",
        ),
        (
            r"Can't chose service_fd_base",
            "descriptors",
            "a process of the job has a descriptor so close to the limit that CRIU has no numbers left for its own",
            "raise the hard limit of descriptors (ulimit -Hn, LimitNOFILE=) to 1,024 above the job's highest one, or give icecore CAP_SYS_RESOURCE",
        ),
        (
            r"Can not set posix lock|cannot lock descriptor \d+ again: Resource temporarily",
            "lock-taken",
            "another process has locked a file that a process of the job had locked",
            "end the other process, or restore where it does not use the file",
        ),
        (
            r"Can't bind inet socket|Address already in use",
            "port-taken",
            "a port that the job listens on is in use",
            "end what listens there; jobs of 'icecore run --network private' have ports of their own",
        ),
        (
            r"has bad size",
            "file-changed",
            "a file that the job had open is no longer as it was",
            "have its files put back or truncated (--files restore or truncate)",
        ),
        (
            r"has bad mode|has bad build-ID|bad checksum",
            "file-changed",
            "a file that the job had open was replaced by another",
            "put the recorded file back",
        ),
        (
            r"Can't open file|File .* not found|No such file or directory",
            "file-missing",
            "a file that the job had open is not there",
            "put the recorded file back",
        ),
        (
            r"CPU (?:capabilities|feature)|[Uu]nsupported FPU|insn feature",
            "cpu",
            "this CPU lacks a feature that the job was using",
            "restore on a machine of the same or a newer CPU generation",
        ),
        (
            r"Can't create a directory \(",
            "proc",
            "the working directory of its root (of jobs: /) cannot be written to, or holds a 'proc.crtools' already, which CRIU makes there for a moment",
            "remove it if nothing is dumped just now, or install icecore where there is a C compiler: then none is needed",
        ),
        (
            r"Can't create cgroup|cgroup",
            "cgroups",
            "the job's cgroups could not be handled",
            "see 'mount -t cgroup,cgroup2': the hierarchies that the job is in must be mounted",
        ),
        (r"Cannot allocate memory|Out of memory", "memory", "not enough memory", "free memory"),
        (
            r"Operation not permitted|Permission denied",
            "permission",
            "a permission is missing",
            "run as root, in a container with --privileged; 'icecore doctor' names the capabilities that are missing",
        ),
    ]
]


def diagnose(log: str, *, most: int = 8) -> Diagnosis:
    """Find the first errors of a log and what they mean.

    Args:
        log: Text of dump.log or restore.log, and of CRIU's standard error.
        most: How many error lines to keep.
    """
    errors: list[str] = []
    for line in log.split("\n"):
        found = _ERROR_LINE.match(line)
        if found and found.group(2) not in errors and not _HARMLESS.search(line):
            errors.append(found.group(2).strip())
            if len(errors) == most:
                break
    for error in errors:
        for pattern, cause in KNOWN:
            if pattern.search(error):
                return Diagnosis(errors, cause)
    return Diagnosis(errors, None)

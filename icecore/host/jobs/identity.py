"""The identity with which a job runs: user, groups, limits and everything else that a process
inherits from its parent.

root starts the jobs of other users. A job gets only rights that its user has without icecore, and
none of root's: see `Identity.of_peer` for a client of a service, `Identity.of_process` for any
process, `Identity.of_user` for a name.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import resource
import select
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from icecore.errors import NotFound, UsageError
from icecore.host.kernel import cgroups, libc, limits, procfs
from icecore.host.kernel.peer import Peer

#: Name of each limit in /proc/PID/limits → its number for setrlimit(2), the same on x86-64 and
#: aarch64.
LIMITS = {
    "Max cpu time": resource.RLIMIT_CPU,
    "Max file size": resource.RLIMIT_FSIZE,
    "Max data size": resource.RLIMIT_DATA,
    "Max stack size": resource.RLIMIT_STACK,
    "Max core file size": resource.RLIMIT_CORE,
    "Max resident set": resource.RLIMIT_RSS,
    "Max processes": resource.RLIMIT_NPROC,
    "Max open files": resource.RLIMIT_NOFILE,
    "Max locked memory": resource.RLIMIT_MEMLOCK,
    "Max address space": resource.RLIMIT_AS,
    "Max file locks": 10,
    "Max pending signals": resource.RLIMIT_SIGPENDING,
    "Max msgqueue size": resource.RLIMIT_MSGQUEUE,
    "Max nice priority": resource.RLIMIT_NICE,
    "Max realtime priority": resource.RLIMIT_RTPRIO,
    "Max realtime timeout": resource.RLIMIT_RTTIME,
}
UNLIMITED = -1

_LIMIT_LINE = re.compile(r"(\S.*?) {2,}(\d+|unlimited) +(\d+|unlimited)")
#: A process in another namespace of these kinds sees a different machine than icecore.
_SAME_NAMESPACES = ("user", "mnt", "pid", "net")
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}
_IOPRIO_WHO_PROCESS = 1
_SCHED_DEADLINE = 6
_REAL_TIME = (os.SCHED_FIFO, os.SCHED_RR, _SCHED_DEADLINE)
#: CAP_CHOWN … CAP_CHECKPOINT_RESTORE, and those that later kernels add.
ALL_CAPABILITIES = (1 << 64) - 1


class Identity(msgspec.Struct, frozen=True):
    """What a job inherits.

    Attributes:
        user, group: Its uid and gid: real, effective, saved and for file access.
        groups: Its supplementary groups.
        name: The user's name; the uid's digits if the user database has none.
        home, shell: From the user database; empty if it has no entry.
        limits: Number of each limit of setrlimit(2) → soft and hard limit; `UNLIMITED`: none.
            Empty: those of the process that starts the job.
        umask: Of the files that it makes; None: that of the process that starts the job.
        nice: -20 … 19.
        policy, priority: Scheduling policy (SCHED_…) and real-time priority.
        cpus: The processors on which it may run; empty: those of the process that starts it.
        io_priority: As returned by ioprio_get(2); 0: none of its own.
        oom_score_adj: -1000 … 1000.
        cgroups: By hierarchy (`icecore.host.kernel.cgroups`); None: those of the process that
            starts it.
        bounding: Capability bounding set, as a bit mask.
        no_new_privs: Executing a file never grants privileges.
    """

    user: int
    group: int
    groups: tuple[int, ...]
    name: str
    home: str = ""
    shell: str = ""
    limits: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    umask: int | None = None
    nice: int = 0
    policy: int = 0
    priority: int = 0
    cpus: frozenset[int] = frozenset()
    io_priority: int = 0
    oom_score_adj: int = 0
    cgroups: Mapping[str, str] | None = None
    bounding: int = ALL_CAPABILITIES
    no_new_privs: bool = False

    @classmethod
    def of_user(cls, who: str) -> Identity:
        """Return the identity of a user: groups from the user database, everything else that of
        this process.

        Args:
            who: ``USER``, ``UID``, ``USER:GROUP`` or ``UID:GID``. A uid needs no entry in the
                user database; without one and without a group its gid is the same number.

        Raises:
            NotFound: There is no such user or group.
            UsageError: The text is not a valid user or group.
        """
        wanted, colon, wanted_group = who.partition(":")
        if not wanted or (colon and not wanted_group):
            raise UsageError(f"{who!r} names no user", cure="write USER, UID, or USER:GROUP")
        found = _user_entry(wanted)
        user = found.pw_uid if found is not None else _number(wanted, "user")
        group = found.pw_gid if found is not None else user
        groups = tuple(os.getgrouplist(found.pw_name, group)) if found is not None else (group,)
        if colon:
            group = _group(wanted_group)
            groups = (group,)  # as 'USER:GROUP' does elsewhere (chroot(1), docker run)
        own = replace(cls.of_process(os.getpid()), home="", shell="", cgroups=None)
        return _named(replace(own, user=user, group=group, groups=groups))

    @classmethod
    def of_process(cls, pid: int, *, pidfd: int = -1, user: int | None = None) -> Identity:
        """Return the identity of a process. A pid that is reused while it is read is detected.

        Args:
            pid: The process.
            pidfd: A pidfd of it that the caller holds; -1: open one.
            user: The uid that it must have, if known (SO_PEERCRED).

        Raises:
            NotFound: There is no such process, or it has ended.
            UsageError: It has several uids or gids at once (it executes a set-user-ID program); its
                uid is not ``user``; it changed its ids meanwhile; or it is in a sandbox that its
                job would escape.
        """
        with _held(pid, pidfd) as own:
            before = _credentials(pid)
            found = cls._read(pid, before)
            _require_same_machine(pid)
            if _credentials(pid) != before:
                raise UsageError(f"process {pid} changed its credentials while they were read")
            if _has_ended(own):
                raise NotFound(f"process {pid} has ended")
        if user is not None and found.user != user:
            raise UsageError(f"process {pid} is not of user {user}")
        return _named(found)

    @classmethod
    def of_peer(cls, peer: Peer) -> Identity:
        """Return the identity of the process that connected a unix socket.

        Raises:
            NotFound, UsageError: As `of_process`.
        """
        if peer.pid <= 0:
            raise UsageError("the client is in another pid namespace, or has ended")
        # Without a pidfd (an older kernel), a process that has reused the pid has the same uid.
        return cls.of_process(peer.pid, pidfd=peer.pidfd, user=peer.uid)

    @classmethod
    def _read(cls, pid: int, credentials: Mapping[str, list[str]]) -> Identity:
        user = _only(pid, "uids", credentials["Uid"])
        group = _only(pid, "gids", credentials["Gid"])
        try:
            nice, policy, priority = _scheduling(pid)
            return cls(
                user=user,
                group=group,
                groups=tuple(map(int, credentials["Groups"])),
                name=str(user),
                limits=limits_of(pid),
                umask=int(procfs.status_fields(pid)["Umask"][0], 8),
                nice=nice,
                policy=policy,
                priority=priority,
                cpus=frozenset(os.sched_getaffinity(pid)),
                io_priority=_io_priority(pid),
                oom_score_adj=int(Path(f"/proc/{pid}/oom_score_adj").read_text()),
                cgroups=cgroups.groups_of(pid),
                bounding=int(credentials["CapBnd"][0], 16),
                no_new_privs=credentials["NoNewPrivs"] == ["1"],
            )
        except (FileNotFoundError, ProcessLookupError) as error:
            raise NotFound(f"process {pid} has ended") from error

    @property
    def is_ours(self) -> bool:
        """Return whether it is this process's own user."""
        return self.user == os.geteuid()

    def environment(self) -> dict[str, str]:
        """Return the variables that describe its user, as login programs set them."""
        named = {"HOME": self.home or "/", "USER": self.name, "LOGNAME": self.name}
        return {**named, **({"SHELL": self.shell} if self.shell else {})}

    def reachable_limits(self) -> tuple[dict[int, tuple[int, int]], list[str]]:
        """Return the limits as this process can set them, and a sentence for each that it cannot raise
        far enough without CAP_SYS_RESOURCE.
        """
        most = highest_limits()
        reachable, short = {}, []
        for number, (soft, hard) in self.limits.items():
            bound = most.get(number, UNLIMITED)
            if _above(hard, bound):
                short.append(shortfall(number, hard, bound))
                hard = bound
            reachable[number] = (hard if _above(soft, hard) else soft, hard)
        return reachable, short

    def as_launch(self) -> dict[str, Any]:
        """Return it as JSON for launch.py.

        Raises:
            UsageError: A cgroup cannot be joined from here.
        """
        reachable, _ = self.reachable_limits()
        joined = [] if self.cgroups is None else cgroups.files_to_join(self.cgroups)
        return {
            "user": self.user,
            "group": self.group,
            "groups": list(self.groups),
            "limits": [[number, *pair] for number, pair in reachable.items()],
            "nice": self.nice,
            "scheduling": [self.policy, self.priority],
            "cpus": sorted(self.cpus),
            "io_priority": self.io_priority,
            "oom_score_adj": self.oom_score_adj,
            "cgroups": joined,
            "bounding": self.bounding,
            "no_new_privs": self.no_new_privs,
        }


def highest_limits(identity: Identity | None = None) -> dict[int, int]:
    """Return the highest hard limits that a process started from here can have, by number, without
    unbounded ones.

    Args:
        identity: An identity whose limits apply as well; None: none.
    """
    bounds: dict[int, int] = {}
    if "CAP_SYS_RESOURCE" not in limits.capabilities():
        bounds = {number: resource.getrlimit(number)[1] for number in LIMITS.values()}
    for number, (_, hard) in (identity.limits if identity is not None else {}).items():
        if _above(bounds.get(number, UNLIMITED), hard):
            bounds[number] = hard
    return {number: bound for number, bound in bounds.items() if bound != UNLIMITED}


def shortfall(number: int, wanted: int, bound: int) -> str:
    """Return a sentence about a limit that is lower than wanted."""
    name = next(name for name, known in LIMITS.items() if known == number).removeprefix("Max ")
    return f"{name} {_words(bound)} instead of {_words(wanted)}"


def may_touch(user: int, owner: int) -> bool:
    """Return whether a user may see, signal, dump, restore or remove what belongs to ``owner``:
    a job (`Description.user`) or a snapshot (`snapshot_owner`). root may touch everything.
    """
    return user in (0, owner)


def user_name(user: int) -> str:
    """Return the name of a uid; its digits if it has none here."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def limits_of(pid: int | str) -> dict[int, tuple[int, int]]:
    """Return the limits of a process by number, soft and hard (/proc/PID/limits). Unlike prlimit(2),
    this requires no CAP_SYS_RESOURCE for a process of another user.

    Raises:
        NotFound: There is no such process.
    """
    try:
        text = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFound(f"there is no process {pid}") from error
    found = {}
    for line in text.splitlines():
        words = _LIMIT_LINE.match(line)
        if words is not None and words[1] in LIMITS:
            soft, hard = (
                UNLIMITED if text == "unlimited" else int(text) for text in words.groups()[1:]
            )
            found[LIMITS[words[1]]] = (soft, hard)
    return found


def _above(value: int, most: int) -> bool:
    return most != UNLIMITED and (value == UNLIMITED or value > most)


def _words(value: int) -> str:
    return "unlimited" if value == UNLIMITED else str(value)


def _named(identity: Identity) -> Identity:
    try:
        found = pwd.getpwuid(identity.user)
    except KeyError:
        return replace(identity, name=str(identity.user))
    return replace(identity, name=found.pw_name, home=found.pw_dir, shell=found.pw_shell)


def _user_entry(who: str) -> pwd.struct_passwd | None:
    """Return the entry of a user by name or uid; None: a uid has none."""
    try:
        return pwd.getpwnam(who)
    except KeyError:
        pass
    try:
        return pwd.getpwuid(_number(who, "user"))
    except KeyError:
        return None


def _group(who: str) -> int:
    try:
        return grp.getgrnam(who).gr_gid
    except KeyError:
        return _number(who, "group")


def _number(text: str, kind: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise NotFound(f"there is no {kind} {text}", cure=f"'getent {_DATABASES[kind]}' lists them")
    number = int(text)
    if number >= 2**32 - 1:  # (uid_t)-1 means "unchanged" to the kernel
        raise UsageError(f"{text} is no number of a {kind}")
    return number


_DATABASES = {"user": "passwd", "group": "group"}


def _scheduling(pid: int) -> tuple[int, int, int]:
    """Return the nice value, policy and real-time priority that a child of a process has.

    With SCHED_RESET_ON_FORK (sched(7)), as rtkit sets it, a process may have a negative nice value
    or a real-time priority that its children do not inherit.
    """
    nice = os.getpriority(os.PRIO_PROCESS, pid)
    priority = os.sched_getparam(pid).sched_priority
    policy = os.sched_getscheduler(pid)  # last: the flag is set with the others, and stays
    if policy & os.SCHED_RESET_ON_FORK:
        policy &= ~os.SCHED_RESET_ON_FORK
        nice = max(0, nice)
        if policy in _REAL_TIME:
            nice, policy, priority = 0, os.SCHED_OTHER, 0
    return nice, policy, priority


@contextmanager
def _held(pid: int, pidfd: int) -> Iterator[int]:
    """Hold a process: as long as the descriptor exists and the process has not ended, its pid is
    its own.
    """
    if pidfd >= 0:
        yield pidfd
        return
    try:
        own = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise NotFound(f"there is no process {pid}") from error
    try:
        yield own
    finally:
        os.close(own)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def file_rights(user: int, pids: Iterable[int]) -> tuple[int, list[int]]:
    """Return the primary group and all groups with which a user accesses files.

    Args:
        pids: Processes of the user's job. For a user without an entry in the user database, the
            groups are those of a process that runs as this user alone.

    Raises:
        NotFound: The user is unknown, and there is no such process.
    """
    try:
        about = pwd.getpwuid(user)
        return about.pw_gid, os.getgrouplist(about.pw_name, about.pw_gid)
    except KeyError:
        pass
    for pid in pids:
        with suppress(NotFound):
            found = _credentials(pid)
            if set(found["Uid"]) == {str(user)} and len(set(found["Gid"])) == 1:
                group = int(found["Gid"][0])
                return group, [group, *map(int, found["Groups"])]
    raise NotFound(f"user {user} is unknown on this machine")


def _credentials(pid: int) -> dict[str, list[str]]:
    fields = procfs.status_fields(pid)
    return {key: fields[key] for key in ("Uid", "Gid", "Groups", "CapBnd", "NoNewPrivs")}


def _only(pid: int, what: str, values: list[str]) -> int:
    """Return the common value of the real, effective, saved and file-system ids.

    A process that executes a set-user-ID program has ids of two users, and its environment and
    limits are not those of the privileged one.
    """
    if len(set(values)) != 1:
        raise UsageError(
            f"process {pid} has several {what} ({', '.join(values)})",
            cure="start the job from an ordinary process of one user",
        )
    return int(values[0])


def _require_same_machine(pid: int) -> None:
    """Refuse a process in a sandbox that a job started by icecore would escape.

    Raises:
        UsageError: It is in such a sandbox.
    """
    ours, theirs = procfs.namespaces(os.getpid()), procfs.namespaces(pid)
    other = [kind for kind in _SAME_NAMESPACES if ours.get(kind) != theirs.get(kind)]
    cure = "start the job outside of the container or sandbox"
    if other:
        raise UsageError(f"process {pid} has namespaces of its own ({', '.join(other)})", cure=cure)
    try:
        chrooted = not os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/proc/self/root"))
    except FileNotFoundError as error:
        raise NotFound(f"process {pid} has ended") from error
    if chrooted:
        raise UsageError(f"process {pid} has another root directory", cure=cure)
    filters = [
        int(procfs.status_fields(who).get("Seccomp_filters", ["0"])[0]) for who in (pid, "self")
    ]
    if filters[0] > filters[1]:
        raise UsageError(f"process {pid} has seccomp filters", cure=cure)
    label = _security_label(pid)
    if label not in (_security_label("self"), "", "unconfined"):
        raise UsageError(
            f"process {pid} is confined by a security module ({label})", cure=_cure_of(label)
        )


def _cure_of(label: str) -> str:
    """Return how a user gets out of a confinement that its job would escape.

    A profile of AppArmor in complain mode still enforces its "deny" rules (aa-complain(8)), and one
    that is later enforced would not apply to the job. The same holds for SELinux in permissive mode.
    """
    if label.endswith((" (complain)", " (enforce)", " (kill)", " (mixed)", " (prompt)")):
        return (
            "start the job from a process without an AppArmor profile; complain mode is not enough,"
            " because it enforces 'deny' rules"
        )
    return (
        "start the job as a user whom SELinux does not confine;"
        " 'semanage login -a -s unconfined_u USER' makes one"
    )


def _security_label(pid: int | str) -> str:
    """Return what AppArmor or SELinux calls a process's confinement; empty: neither is there."""
    try:
        data = Path(f"/proc/{pid}/attr/current").read_bytes()
    except FileNotFoundError as error:
        if pid != "self" and not Path(f"/proc/{pid}").exists():
            raise NotFound(f"process {pid} has ended") from error
        return ""
    except ProcessLookupError as error:
        raise NotFound(f"process {pid} has ended") from error
    except OSError:  # EINVAL: no security module labels processes
        return ""
    label = os.fsdecode(data.rstrip(b"\0\n"))
    # A user of SELinux is unconfined in this type, and icecore, a service, in another one.
    words = label.split(":")
    if label.endswith(" (unconfined)"):  # a profile of AppArmor that only names a program
        return "unconfined"
    return "unconfined" if len(words) >= 3 and words[2] == "unconfined_t" else label


def _io_priority(pid: int) -> int:
    number = _IOPRIO_GET.get(os.uname().machine)
    return 0 if number is None else max(0, int(libc.syscall(number, _IOPRIO_WHO_PROCESS, pid)))

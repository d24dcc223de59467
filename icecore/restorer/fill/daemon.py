"""The lazy-pages daemon: one thread that hears the guard and the kernel, and keeps every member's
map up to date.

It takes the write lock of a member's map *before* it reads the member's events, and releases it
after it has applied them. It answers page faults at once: absent memory gets zeros, and a page of
the snapshot is requested before all others.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress

from icecore.errors import IcecoreError, RestoreFailed
from icecore.host.kernel import procfs
from icecore.host.kernel.userfaultfd import Event, Fault, Fork, Remap, Remove, Unmap
from icecore.restorer.guard.client import MORE_DESCRIPTORS, GuardLost, Message, RestoreGuard
from icecore.restorer.guard.guard_process import EVENT_BYTES, descendants
from icecore.restorer.place.locks import SharedLock
from icecore.restorer.place.members import Family, Member
from icecore.sizes import PAGE

_ANSWER_SECONDS = 30.0
_MESSAGE = struct.Struct("<B7xQQQ")
#: Address spaces that may be known before the daemon looks for those of ended processes.
_FEW = 64


def parse_events(data: bytes, children: list[int]) -> list[Event]:
    """Return the events that another process read from a userfaultfd (struct uffd_msg,
    linux/userfaultfd.h).

    Args:
        data: The messages.
        children: For each fork in them the child's descriptor in this process.
    """
    events: list[Event] = []
    born = iter(children)
    for kind, first, second, third in _MESSAGE.iter_unpack(
        data[: len(data) // EVENT_BYTES * EVENT_BYTES]
    ):
        match kind:
            case 0x12:
                events.append(Fault(second & ~(PAGE - 1), first, third & 0xFFFFFFFF))
            case 0x13:
                events.append(Fork(next(born)))
            case 0x14:
                events.append(Remap(first, second, third))
            case 0x15:
                events.append(Remove(first, second))
            case 0x16:
                events.append(Unmap(first, second))
            case _:
                raise RestoreFailed(
                    f"userfaultfd event {kind:#x} is unknown", cure="use a newer icecore"
                )
    return events


def _refuse_shared(message: Message) -> None:
    raise GuardLost(f"the restore's guard opened shared memory unasked: {message.about}")


class Daemon:
    """Serves the tree's missing memory.

    Args:
        guard: Holds the descriptors and runs CRIU.
        families: The processes with missing memory, by CRIU's id.
        urgent: Called with (family, row) when a thread waits for a page of that cell.
        failed: Called once, in any thread, with what went wrong.
    """

    def __init__(
        self,
        guard: RestoreGuard,
        families: Mapping[int, Family],
        urgent: Callable[[Family, int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._guard = guard
        self._families = families
        self._urgent = urgent
        self._failed = failed
        self._by_descriptor: dict[int, tuple[Family, Member]] = {}
        self._again: list[tuple[Family, Member, Fault]] = []
        self._many = _FEW
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(guard.fileno(), select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        self._finish = False
        self._stop = False
        self._change = threading.Condition()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="faults", daemon=True)
        #: Called when CRIU has ended.
        self.ended: Callable[[], None] = lambda: None
        #: Called with what the guard says of shared memory; takes the descriptor.
        self.shared: Callable[[Message], None] = _refuse_shared
        self.restored = False
        self.criu_pid = 0
        self.criu_status: int | None = None
        self.criu_error = ""
        self.killed = False
        self.complete = False
        self.exits: dict[int, int] = {}
        self.faults = 0
        #: Cells in the order of their first page faults: (CRIU's id of the process, row).
        self.touched: list[tuple[int, int]] = []
        self._touched: set[tuple[int, int]] = set()
        self._shared: SharedLock | None = None
        self._first: Mapping[int, int] = {}

    # -- for other threads

    def share(self, lock: SharedLock, first: Mapping[int, int]) -> None:
        """Share a lock with placers, which place a cell as long as its flag is not set. To be called
        before `start`.

        Args:
            first: CRIU's id of a process → the flag of its first cell; the others' follow.
        """
        self._shared, self._first = lock, first

    def start(self) -> None:
        """Start to listen."""
        self._thread.start()

    @property
    def started(self) -> bool:
        """Whether the thread was started."""
        return self._thread.ident is not None

    def wait_for(self, condition: Callable[[Daemon], bool], seconds: float | None) -> bool:
        """Wait until a condition on this object's public attributes holds.

        Returns:
            Whether it does; False: the time is up.

        Raises:
            The error that ended the daemon.
        """
        with self._change:
            done = self._change.wait_for(
                lambda: condition(self) or self._failure is not None, seconds
            )
            if self._failure is not None and not condition(self):
                raise self._failure
            return done

    def finish(self) -> None:
        """Close every descriptor, also the guard's, because everything is placed; then `complete`
        is set.
        """
        self._finish = True
        self._wake()

    def stop(self) -> None:
        """End the thread and close the descriptors of this process."""
        self._stop = True
        self._wake()
        if self.started and self._thread is not threading.current_thread():
            self._thread.join()
        for descriptor, (_, member) in self._by_descriptor.items():
            # No thread may place through a number that soon means another file.
            with member.lock.writing():
                member.gone = True
                os.close(descriptor)
        self._by_descriptor.clear()
        for descriptor in (self._wake_read, self._wake_write):
            if descriptor >= 0:
                os.close(descriptor)
        self._wake_read = self._wake_write = -1
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def check_unmapped(self, family: Family, member: Member, address: int) -> None:
        """Check that the process has nothing at ``address``, where the kernel refuses a page.

        Raises:
            RestoreFailed: It has memory there, and would find zeros.
        """
        # A child does not have memory that its parent keeps from its children (MADV_DONTFORK).
        if member.forked:
            return
        for pid in descendants(self._guard.pid):
            try:
                if procfs.status(pid).own_pid != family.process:
                    continue
                maps = procfs.read_maps(pid)
            except IcecoreError:
                continue
            if any(m.start <= address < m.start + m.length for m in maps):
                raise RestoreFailed(
                    f"process {family.process}: CRIU did not register its memory at {address:#x} with userfaultfd, "
                    "so it cannot be filled"
                )

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"\0")

    # -- the thread

    def _serve(self) -> None:
        try:
            while not self._stop:
                self._round()
        except BaseException as error:  # noqa: BLE001 - raised by who waits, and passed on
            with self._change:
                self._failure = error
                self._change.notify_all()
            self._failed(error)

    def _round(self) -> None:
        # A poll does not show what the guard said while it was asked for events.
        timeout = 0 if self._guard.waiting() else 1 if self._again else None
        for descriptor, _ in self._poll.poll(timeout):
            if descriptor == self._guard.fileno():
                self._hear()
            elif descriptor == self._wake_read:
                with suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            elif descriptor in self._by_descriptor:
                self._read_events(*self._by_descriptor[descriptor])
        while self._guard.waiting():
            self._hear()
        again, self._again = self._again, []
        for family, member, fault in again:
            self._answer(family, member, fault)
        if len(self._by_descriptor) > self._many:
            self._forget_dead()
        if self._finish and not self.complete:
            self._close_all()

    def _say(self, **attributes: object) -> None:
        with self._change:
            for name, value in attributes.items():
                setattr(self, name, value)
            self._change.notify_all()

    def _hear(self) -> None:
        message = self._guard.receive(_ANSWER_SECONDS)
        if message is None:
            return
        match message.say:
            case "task":
                self._add_task(message)
            case "restored":
                for family in self._families.values():
                    family.registered = True
                self._say(restored=True)
            case "started":
                self._say(criu_pid=message.number("pid"))
            case "ended":
                self._say(
                    criu_status=message.number("status"),
                    criu_error=str(message.about.get("why", "")),
                )
                self.ended()
            case "exited":
                with self._change:
                    self.exits[message.number("pid")] = message.number("status")
                    self._change.notify_all()
            case "shared":
                self.shared(message)
            case "killed":
                self._say(killed=True)

    def _add_task(self, message: Message) -> None:
        process = message.number("process")
        if "error" in message.about:
            raise RestoreFailed(
                f"the restore's guard could not take the userfaultfd of process {process}: {message.about['error']}",
                cure=MORE_DESCRIPTORS,
            )
        descriptor, keep = message.descriptors[0], message.number("keep")
        # A process without missing memory is served too: CRIU registers its memory all the same, so
        # that it would wait for absent pages. Its memory may come from a file.
        family = self._families.get(process)
        if family is None:
            family = Family.empty(process, self.check_unmapped)
        self._watch(family, Member(descriptor, keep, len(family)))

    def _watch(self, family: Family, member: Member) -> None:
        self._by_descriptor[member.descriptor] = (family, member)
        self._poll.register(member.descriptor, select.POLLIN)
        family.add(member)

    def _forget(self, member: Member) -> None:
        member.gone = True
        self._by_descriptor.pop(member.descriptor, None)
        self._poll.unregister(member.descriptor)
        os.close(member.descriptor)
        self._guard.close_descriptor(member.keep)

    def _forget_dead(self) -> None:
        """Forget children that have ended or execute another program: the kernel reports neither,
        and a job that forks repeatedly would reach the limit on descriptors. To be called whenever
        there are twice as many as the last time, so that it costs little for each fork.
        """
        for family, member in list(self._by_descriptor.values()):
            # The processes that CRIU restored stay: their number does not grow, and placers know
            # them as the first of their families.
            if member.forked and member.dead():
                with member.lock.writing():
                    self._forget(member)
                family.remove(member)
        self._many = max(_FEW, 2 * len(self._by_descriptor))

    def _read_events(self, family: Family, member: Member) -> None:
        faults: list[Fault] = []
        with self._writing(member):
            self._apply_events(family, member, faults)
        for fault in faults:
            self.faults += 1
            self._answer(family, member, fault)

    @contextmanager
    def _writing(self, member: Member) -> Iterator[None]:
        """Keep all threads and placers from placing."""
        with (
            member.lock.writing(),
            self._shared.writing() if self._shared is not None else nullcontext(),
        ):
            yield

    def _apply_events(self, family: Family, member: Member, faults: list[Fault]) -> int:
        """Read and apply the events of one descriptor; the write lock is held. Return how many
        there were.
        """
        message = self._guard.read_events(member.keep, _ANSWER_SECONDS)
        if "error" in message.about:
            cure = MORE_DESCRIPTORS if message.about.get("errno") == errno.EMFILE else ""
            raise GuardLost(
                f"the restore's guard could not read a userfaultfd: {message.about['error']}",
                cure=cure,
            )
        try:
            return self._apply(family, member, message, faults)
        except BaseException:
            # The process goes on until it is killed, and what it has changed is not known in full.
            self._keep_placers_from(family, range(len(family)))
            raise

    def _apply(self, family: Family, member: Member, message: Message, faults: list[Fault]) -> int:
        events = parse_events(message.data, message.descriptors)
        children = message.about["children"]
        assert isinstance(children, list)
        born = iter(children)
        for event in events:
            match event:
                case Fault():
                    faults.append(event)
                case Fork(descriptor):
                    self._keep_placers_from(family, range(len(family)))
                    self._watch(family, member.child(descriptor, next(born), family.wiped))
                case Remap(source, target, length):
                    self._keep_placers_from(family, family.rows_in(source, source + length))
                    self._keep_placers_from(family, family.rows_in(target, target + length))
                    member.map.remap(source, target, length)
                case Unmap(start, end):
                    self._keep_placers_from(family, family.rows_in(start, end))
                    member.map.unmap(start, end)
                case Remove(start, end):
                    self._keep_placers_from(family, family.rows_in(start, end))
                    # A discarded range stays registered: unregistering it would split the VMA, and
                    # a process that then moves it as the one mapping that it made would fail.
                    member.map.remove(start, end)
        return len(events)

    def _keep_placers_from(self, family: Family, rows: range) -> None:
        """Have placers hold these cells of a family: from now on, this process says where they
        belong. The write locks are held.
        """
        first = self._first.get(family.process)
        if self._shared is not None and first is not None:
            self._shared.set_changed(range(first + rows.start, first + rows.stop))

    def _answer(self, family: Family, member: Member, fault: Fault) -> None:
        """Give the page to the thread that waits at a fault, or request it."""
        with member.lock.reading():
            if member.gone:
                return
            original = member.map.original(fault.address)
            if original is not None and family.filed_at(original):
                return  # the kernel wakes the thread once the page is in the file
            row = family.row_at(original) if original is not None else None
            if row is not None and original is not None and family.wants(row, original):
                if (family.process, row) not in self._touched:
                    self._touched.add((family.process, row))
                    self.touched.append((family.process, row))
                if member.missing[row]:
                    self._urgent(family, row)
                else:  # it was placed while the fault was on its way
                    family.wake(member, fault.address)
                return
        if not family.fill_zero(member, fault.address):
            self._again.append((family, member, fault))

    def _close_all(self) -> None:
        """Close the descriptors of all members. Each is complete whatever the pending events say: a
        child that was forked before its parent's last placement is a member by now, or becomes one
        here.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS
        while self._by_descriptor:
            for family, member in list(self._by_descriptor.values()):
                with self._writing(member):
                    faults: list[Fault] = []
                    while self._apply_events(family, member, faults):
                        if time.monotonic() > deadline:
                            return  # it keeps changing; the next round continues
                    if member.left and not member.gone and not member.dead():
                        raise RestoreFailed(
                            f"process {family.process} still misses {member.left} cells at the end of its restore"
                        )
                    self._forget(member)
        self._say(complete=True)

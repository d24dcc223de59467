"""The handlers of the routes about snapshots and repositories."""

from __future__ import annotations

from typing import Any

import msgspec

from icecore.errors import Damaged, Denied, NotFound, UsageError
from icecore.service.api import command_lines, models, requests
from icecore.service.api.listing import paginate
from icecore.service.api.routing import Call
from icecore.service.api.service import Where
from icecore.service.api.starting import as_json, identity_of, start


class Found(msgspec.Struct, frozen=True):
    """A snapshot that the caller may access, and its repository."""

    snapshot: models.Snapshot
    where: Where

    @property
    def owner(self) -> int:
        """The uid of its job; 0 if it is not recorded."""
        return self.snapshot.owner or 0


def find(call: Call, name: str) -> Found:
    """Return the snapshot that a name refers to, among those that the caller may access.

    Raises:
        NotFound: There is no such snapshot.
    """
    where = call.service.where(call.known, call.query.user)
    known = call.service.snapshots(call.known, where)
    return Found(call.service.backing.find(known, name), where)


async def list_snapshots(call: Call) -> Any:
    """List the snapshots that the caller may see, oldest first."""

    def look() -> list[models.Snapshot]:
        where = call.service.where(call.known, call.query.user)
        return [
            one
            for one in call.service.snapshots(call.known, where)
            if call.query.job in ("", one.job)
            and (not call.query.tag or call.query.tag in one.tags)
        ]

    shown, following = paginate(
        await call.service.stored(look), call.query, lambda one: one.snapshot
    )
    return models.Items(items=shown, next=following)


async def show_snapshot(call: Call) -> Any:
    """Show what a snapshot contains."""
    found: Found = call.subject
    return await call.service.stored(
        call.service.backing.details, found.where, found.snapshot.snapshot
    )


def _start(call: Call, kind: models.Kind, line: list[str], **more: Any) -> Any:
    found: Found = call.subject
    return start(
        call,
        kind,
        line,
        owner=found.owner,
        where=found.where,
        job=found.snapshot.job,
        snapshot=found.snapshot.snapshot,
        **more,
    )


async def restore_snapshot(call: Call) -> Any:
    """Restore a snapshot's processes as the user who owned them."""
    found: Found = call.subject
    caller, wanted = call.known, call.body
    if found.snapshot.quarantined:
        raise Damaged("snapshot", found.snapshot.snapshot, found.snapshot.quarantined)
    if found.snapshot.owner is None and not caller.whole_node:
        raise Denied(
            "the users of the processes in this snapshot cannot be determined",
            cure="ask an administrator to restore it",
        )
    if wanted.name and not caller.may_touch(wanted.name, found.owner):
        raise Denied(f"the caller may not touch a job of the name {wanted.name!r}")
    # A caller that sees all does not restore for itself: the job gets its recorded user, and the
    # limits of the service.
    identity = None if caller.sees_all else as_json(await identity_of(call))
    return _start(
        call,
        "restore",
        command_lines.of_restore(wanted, found.snapshot.snapshot),
        identity=identity,
    )


async def print_snapshot(call: Call) -> Any:
    """Print what a snapshot contains, as ``icecore show`` does."""
    return _start(call, "show", command_lines.of_show(call.body, call.subject.snapshot.snapshot))


async def compare_snapshot(call: Call) -> Any:
    """Compare a snapshot with an older one, as ``icecore diff`` does."""
    if call.body.older:
        found: Found = call.subject
        known = await call.service.stored(call.service.snapshots, call.known, found.where)
        if call.body.older not in {one.snapshot for one in known}:
            raise NotFound(f"there is no snapshot {call.body.older!r}")
    return _start(call, "diff", command_lines.of_diff(call.body, call.subject.snapshot.snapshot))


async def mark_snapshot(call: Call) -> Any:
    """Pin or tag a snapshot."""
    if call.body.pin is None and not call.body.add_tags and not call.body.remove_tags:
        raise UsageError("the request changes no mark", cure="give pin, add_tags or remove_tags")
    return _start(call, "mark", command_lines.of_mark(call.body, call.subject.snapshot.snapshot))


async def forget_snapshots(call: Call) -> Any:
    """Forget snapshots, by id or by a policy for one job; a dry run unless told otherwise."""
    wanted: requests.ForgetRequest = call.body
    if bool(wanted.snapshots) == bool(wanted.job):
        raise UsageError(
            "the request has neither or both of 'snapshots' and 'job'", cure="give one of them"
        )
    if wanted.snapshots and (wanted.keep or wanted.keep_tags):
        raise UsageError("named snapshots and a policy exclude each other", cure="give one of them")
    where = call.service.where(call.known, call.query.user)
    known = await call.service.stored(call.service.snapshots, call.known, where)
    ids = {one.snapshot for one in known}
    for id in wanted.snapshots:
        if id not in ids:
            raise NotFound(f"there is no snapshot {id!r}")
    if wanted.job:
        if where.shared and not call.known.whole_node:
            raise Denied(
                "users share this repository, and a policy applies to all snapshots of a name",
                cure="name the snapshots to forget, or ask an administrator",
            )
        if wanted.job not in {one.job for one in known}:
            raise NotFound(f"there is no snapshot of a job {wanted.job!r}")
    uid = call.known.uid or 0
    jobs = {one.job for one in known if one.snapshot in set(wanted.snapshots)}
    job = wanted.job or (jobs.pop() if len(jobs) == 1 else "")
    return start(call, "forget", command_lines.of_forget(wanted), owner=uid, where=where, job=job)


# -- repositories


async def show_repository(call: Call) -> Any:
    """Show the repository's sizes."""
    return await call.service.stored(call.service.backing.statistics, call.subject)


def _maintain(call: Call, kind: models.Kind, line: list[str]) -> Any:
    return start(call, kind, line, owner=call.known.uid or 0, where=call.subject)


async def collect_repository(call: Call) -> Any:
    """Free the space of forgotten snapshots; a dry run unless told otherwise."""
    if call.body.fence is not None and not call.known.whole_node:
        raise Denied(
            "only administrators may declare silent sessions dead", cure="leave 'fence' out"
        )
    return _maintain(call, "gc", command_lines.of_gc(call.body))


async def check_repository(call: Call) -> Any:
    """Verify the objects that snapshots need."""
    return _maintain(call, "check", command_lines.of_check(call.body))

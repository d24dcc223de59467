"""Breaks processes off at each of their system calls on files, while they put files back, undo or
finish: by SIGKILL, or by an error of the call.

Run as ``python killed_put_back.py FOLDER [data]``; prints one line of JSON for each state that a kill left
and a recovery found. Single-threaded but for what the code under test starts, so that it can fork.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[2]))

from icecore.errors import IcecoreError
from icecore.restorer.files import file_journal, jobfiles
from icecore.restorer.files.file_recovery import recover
from icecore.restorer.files.plan import Action
from icecore.restorer.files.put_back import PutBack
from icecore.store.format.manifest import OpenFile
from icecore.store.format.surroundings import Folder
from tests.restorer.job_file_places import HOSTILE, look, recorded, written

THEN = b"what the file held then\n" * 300
NEWER = b"newer, and longer than it was\n" * 900
#: Exit statuses of a child that a call failed in: it undid everything, or left the rest to the next
#: command.
_UNDONE, _LEFT = 3, 4
#: Python's audit events of calls that change names or contents, or open what does.
EVENTS = {
    "open",
    "os.rename",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.utime",
    "os.chown",
    "os.chmod",
    "shutil.rmtree",
}


class Steps:
    """Counts the calls of this process, and kills it before one of them, or has that one fail."""

    def __init__(self, last: int, *, fails: bool = False) -> None:
        self.count = 0
        self.last = last
        self.fails = fails

    def install(self) -> None:
        sys.addaudithook(lambda event, _: self.step() if event in EVENTS else None)
        plain = jobfiles.rename

        def rename(*words: object) -> None:
            self.step()
            plain(*words)  # type: ignore[arg-type]
            self.step()

        jobfiles.rename = rename  # type: ignore[assignment]
        read = os.pread

        def pread(*words: int) -> bytes:
            self.step()
            return read(*words)

        os.pread = pread

    def step(self) -> None:
        self.count += 1
        if self.count != self.last:
            return
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.kill(os.getpid(), signal.SIGKILL)


def lay_out(top: Path) -> list[Action]:
    """Files that are newer than their snapshot, in a directory of a user's; what a restore would do
    to them.
    """
    home = top / "home"
    home.mkdir(parents=True)
    os.chown(home, HOSTILE, HOSTILE)
    made = {}
    for name in ("replaced", "gone", "grown", "linked", "kept"):
        path = home / name
        path.write_bytes(THEN)
        path.chmod(0o640)
        os.chown(path, HOSTILE, HOSTILE)
        os.utime(path, ns=(10**18, 10**18))
        made[name] = recorded(path)
    for name in ("replaced", "linked", "kept"):
        (home / name).write_bytes(NEWER)
    with open(home / "grown", "ab") as file:
        file.write(NEWER)
    os.utime(home / "linked", ns=(2 * 10**18, 2 * 10**18))
    os.utime(home / "kept", ns=(2 * 10**18, 2 * 10**18))
    os.utime(home / "grown", ns=(2 * 10**18, 2 * 10**18))
    (home / "gone").unlink()

    def at(file: OpenFile, name: str, *links: str) -> OpenFile:
        return msgspec.structs.replace(
            file, path=str(home / name), links=[str(home / link) for link in links]
        )

    return [
        Action("replace", made["replaced"]),
        Action("create", at(made["gone"], "made/below/gone")),
        Action("truncate", made["grown"]),
        Action("rewrite", at(made["linked"], "link_remap.7", "linked")),
        Action("replace", made["kept"], keep=True),
    ]


@dataclass
class Laid:
    """What a restore would do, and what to the directories."""

    actions: list[Action]
    folders: list[Folder] = field(default_factory=list)
    settled: list[Folder] = field(default_factory=list)

    def written(self, top: Path) -> PutBack:
        return written(
            self.actions, THEN, top / "state", folders=self.folders, settled=self.settled
        )


def lay_out_data(top: Path) -> Laid:
    """A data directory that has changed in every way since its snapshot."""
    home = top / "home"
    (home / "extra/below").mkdir(parents=True)
    (home / "flipped").mkdir()
    (home / "extra/below/file").write_bytes(NEWER)
    (home / "flipped/inner").write_bytes(NEWER)
    (home / "newer").write_bytes(NEWER)
    (home / "replaced").write_bytes(NEWER)
    (home / "link").symlink_to("newer")
    (home / "linked").write_bytes(NEWER)
    home.chmod(0o750)
    for path in [home, *home.rglob("*")]:
        os.chown(path, HOSTILE, HOSTILE, follow_symlinks=False)

    def then(name: str) -> OpenFile:
        return msgspec.structs.replace(
            recorded(home / "replaced", writable=False),
            path=str(home / name),
            size=len(THEN),
            mtime_ns=10**18,
        )

    def act(kind: str, name: str, **more: Any) -> Action:
        there = os.path.lexists(home / name) and not more.get("cleared")
        size = len(NEWER) if there else None
        return Action(kind, then(name), size, data=True, **more)  # type: ignore[arg-type]

    return Laid(
        [
            act("remove", "extra"),
            act("remove", "flipped"),
            act("remove", "newer"),
            act("replace", "replaced", attributes={b"user.kind": b"tested"}),
            act("create", "flipped", cleared=True),
            act("create", "made/below/gone"),
            act("symlink", "link", target=b"replaced"),
            act("symlink", "made/link", target=b"/nowhere"),
            act("fifo", "made/fifo"),
            act("link", "linked", target=os.fsencode(home / "replaced")),
        ],
        [
            Folder(str(home / "made"), 0o711, HOSTILE, HOSTILE, 10**18),
            Folder(str(home / "made/below"), 0o550, HOSTILE, HOSTILE, 10**18),
        ],
        [Folder(str(home), 0o710, HOSTILE, HOSTILE, 10**18)],
    )


def forked(work: Callable[[], None]) -> int:
    """Run in a child; its wait status."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException as error:  # noqa: BLE001 - a child must not come back
            traceback.print_exception(error, file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def through(back: PutBack, then: str) -> None:
    back.exchange()
    if then == "fails":
        assert back.abandon() == []
        return
    back.hand_over()
    assert back.finish() == []


def recovered(top: Path, last: int = 0) -> int:
    """Recover in a child, killed at step ``last`` if any; its wait status."""

    def work() -> None:
        Steps(last).install()
        told: list[tuple[object, object]] = []
        recover(
            top / "state", lambda event: told.append((event.fields["how"], event.fields["left"]))
        )
        assert all(left == [] or how == "kept" for how, left in told), told

    return forked(work)


def names(top: Path) -> dict[str, tuple[object, ...]]:
    return look(top / "home", inodes=True)


def outcome(
    top: Path, before: dict[str, tuple[object, ...]], after: dict[str, tuple[object, ...]]
) -> str:
    """Whether all files are old, or all are new, or all new with all that they replaced beside
    them; else what is not.
    """
    now = names(top)
    if left := list((top / "state" / file_journal.FOLDER).glob("*")):
        return (
            "kept"
            if [one.suffix for one in left] == [".kept"] and _is_kept(now, before, after, left[0])
            else f"left {left}"
        )
    if now == before:
        return "old"
    if _but_inodes(now) == _but_inodes(after):
        return "new"
    return f"mixed: {sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))}"


def _is_kept(
    now: dict[str, tuple[object, ...]],
    before: dict[str, tuple[object, ...]],
    after: dict[str, tuple[object, ...]],
    aside: Path,
) -> bool:
    """Whether the files are new, and everything that was there before still exists, and is named."""
    beside = {name: found for name, found in now.items() if ".icecore-" in name}
    new = {name: found for name, found in now.items() if name not in beside}
    told = (aside / "left.txt").read_text()
    if "extra" in before:
        removed = ("extra", "flipped", "newer", "replaced", "link", "linked")
        return _but_inodes(new) == _but_inodes(after) and all(
            f"/{name} was before the restore" in told for name in removed
        )
    contents = [found[3] for found in beside.values()]
    saved = [path.read_bytes() for path in aside.iterdir()]
    return (
        _but_inodes(new) == _but_inodes(after)
        and before["replaced"][3] in contents
        and any(NEWER in one for one in saved)
        and all(
            f"/{name} was before the restore" in told
            for name in ("replaced", "grown", "linked", "kept")
        )
    )


def _but_inodes(found: dict[str, tuple[object, ...]]) -> dict[str, object]:
    """Without what differs between two new states: inodes, and when a file was cut."""
    shown: dict[str, object] = {}
    for name, (mode, user, group, content, _) in found.items():
        shown[name] = (
            mode,
            user,
            group,
            content[0] if name == "grown" and isinstance(content, tuple) else content,
        )
    return shown


def main(folder: Path, kind: str = "open") -> None:
    def laid_out(top: Path) -> Laid:
        return lay_out_data(top) if kind == "data" else Laid(lay_out(top))

    whole = folder / "whole"
    through(laid_out(whole).written(whole), "runs")
    after = names(whole)
    shutil.rmtree(whole)
    for then in ("runs", "fails", "breaks"):
        last = 0
        while True:
            last += 1
            top = folder / f"{then}-{last}"
            laid = laid_out(top)
            before = names(top)

            def work(
                laid: Laid = laid, top: Path = top, last: int = last, then: str = then
            ) -> None:
                steps = Steps(last, fails=then == "breaks")
                steps.install()
                if then != "breaks":
                    through(laid.written(top), then)
                    return
                try:
                    back = laid.written(top)  # abandons what fails there
                except (
                    IcecoreError,
                    OSError,
                ):  # the writer's own errors are named by who called it
                    sys.exit(_UNDONE)
                try:
                    back.exchange()
                    back.hand_over()
                except IcecoreError:
                    assert back.abandon() == []
                    sys.exit(_UNDONE)
                if back.finish() or steps.count >= last:
                    sys.exit(_LEFT)  # the job runs; the next command finishes

            status = forked(work)
            if os.WIFEXITED(status) and not os.WEXITSTATUS(status):
                print(
                    json.dumps(
                        {
                            "then": then,
                            "step": last,
                            "status": status,
                            "outcome": outcome(top, before, after),
                        }
                    ),
                    flush=True,
                )
                break
            if (
                os.WIFEXITED(status)
                and os.WEXITSTATUS(status) == _UNDONE
                and (found := outcome(top, before, after)) != "old"
            ):
                print(
                    json.dumps(
                        {
                            "then": then,
                            "step": last,
                            "status": status,
                            "outcome": f"not undone: {found}",
                        }
                    ),
                    flush=True,
                )
            # The recovery is killed, too, at a step that differs from case to case.
            recovered(top, last=1 + last * 7 % 23)
            status = recovered(top)
            print(
                json.dumps(
                    {
                        "then": then,
                        "step": last,
                        "status": status,
                        "outcome": outcome(top, before, after),
                    }
                ),
                flush=True,
            )
            shutil.rmtree(top)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

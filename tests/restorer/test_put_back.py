"""Files are all old or all new, whatever ends the restore, and what others did to them meanwhile is
left alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from icecore.errors import RestoreFailed
from icecore.events import Event
from icecore.restorer.files import file_recovery, plan
from icecore.restorer.files.file_journal import FileJournal
from icecore.restorer.files.file_recovery import recover
from icecore.restorer.files.plan import can_keep, plan_files
from icecore.restorer.files.put_back import PutBack
from tests.restorer import killed_put_back
from tests.restorer.job_file_places import look, manifest_of, recorded, written
from tests.restorer.killed_put_back import HOSTILE, NEWER, THEN, lay_out

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="files of several users")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["files", "data"])
def test_whatever_step_is_the_last_one_all_is_old_or_all_new(what: str, tmp_path: Path) -> None:
    """By SIGKILL, after which the recovery is killed as well; and by an error of the step, after
    which nothing but this process is needed.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            str(Path(killed_put_back.__file__)),
            str(tmp_path),
            *(["data"] if what == "data" else []),
        ],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [
        case for case in cases if case["status"] or case["outcome"] not in ("old", "new", "kept")
    ] == [], done.stderr
    seen = Counter((case["then"], case["outcome"]) for case in cases)
    assert seen["runs", "old"] > 40 and seen["runs", "new"] > (5 if what == "files" else 10), seen
    if what == "files":
        assert 0 < seen["runs", "kept"] < 5, seen
        assert seen["fails", "old"] > 60 and seen["breaks", "old"] > 40, seen
    assert seen["fails", "new"] == seen["fails", "kept"] == 0
    assert cases[-1]["outcome"] == "new", "without a step that fails the job runs"


def exchanged(top: Path) -> PutBack:
    back = written(lay_out(top), THEN, top / "state")
    back.exchange()
    return back


def forget(back: PutBack) -> None:
    """As if its process had been killed."""
    assert back.journal is not None
    back.journal.close()


def recovered(state: Path) -> list[Event]:
    events: list[Event] = []
    recover(state, events.append)
    return events


@pytest.mark.parametrize("how", ["in this process", "by another"])
def test_what_somebody_wrote_meanwhile_is_left_alone_and_told(tmp_path: Path, how: str) -> None:
    back = exchanged(tmp_path)
    home = tmp_path / "home"
    (home / "replaced.new").write_bytes(b"somebody else's\n")
    (home / "replaced.new").rename(home / "replaced")
    with open(home / "grown", "ab") as file:
        file.write(b"appended after the cut\n")
    if how == "in this process":
        left = back.abandon()
    else:
        forget(back)
        (event,) = recovered(tmp_path / "state")
        assert event.name == "restore.recovered" and event.fields["how"] == "undone"
        left = event.fields["left"]  # type: ignore[assignment]
    assert (
        len(left) == 3
        and "another process replaced" in " ".join(left)
        and "was written to after it was cut" in " ".join(left)
    ), left
    assert (home / "replaced").read_bytes() == b"somebody else's\n"
    assert (home / "grown").read_bytes() == THEN + b"appended after the cut\n"
    (kept,) = [path for path in home.iterdir() if path.name.startswith(".replaced")]
    assert kept.read_bytes() == NEWER, "what it was before is still there"
    (folder,) = (tmp_path / "state" / "restores").iterdir()
    assert [path.read_bytes() for path in folder.glob("*.saved")] == [NEWER]
    assert (home / "linked").read_bytes() == NEWER, "the others are undone"
    assert recovered(tmp_path / "state") == [], "it is told once"


def test_an_old_file_that_somebody_removed_meanwhile_is_told(tmp_path: Path) -> None:
    back = exchanged(tmp_path)
    (kept,) = [path for path in (tmp_path / "home").iterdir() if path.name.startswith(".replaced")]
    kept.unlink()
    left = back.abandon()
    assert (
        "another process removed the earlier file" in left[0]
        and (tmp_path / "home" / "replaced").read_bytes() == THEN
    )


def test_the_journal_of_a_living_restore_is_left_alone(tmp_path: Path) -> None:
    back = exchanged(tmp_path)
    now = look(tmp_path)
    assert recovered(tmp_path / "state") == []
    assert look(tmp_path) == now
    assert back.abandon() == []


def test_a_journal_is_not_applied_to_another_directory(tmp_path: Path) -> None:
    back = exchanged(tmp_path)
    forget(back)
    home = tmp_path / "home"
    home.rename(tmp_path / "away")
    home.mkdir()
    for path in (tmp_path / "away").glob("*"):
        if path.is_file():
            (home / path.name).write_bytes(b"another file")
    before = look(tmp_path / "home"), look(tmp_path / "away")
    (event,) = recovered(tmp_path / "state")
    assert all(
        "another one now" in text or "not there" in text or "what was saved" in text
        for text in event.fields["left"]
    )  # type: ignore[union-attr]
    assert (look(tmp_path / "home"), look(tmp_path / "away")) == before


def test_after_a_start_of_the_machine_files_are_known_by_their_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions = lay_out(tmp_path)
    before = look(tmp_path / "home")
    back = written(actions, THEN, tmp_path / "state")
    back.exchange()
    forget(back)
    monkeypatch.setattr(file_recovery, "boot_id", lambda: "another")
    (event,) = recovered(tmp_path / "state")
    assert event.fields["left"] == [] and look(tmp_path / "home") == before


def test_a_journal_that_makes_no_sense_changes_nothing_and_is_told(tmp_path: Path) -> None:
    back = exchanged(tmp_path)
    forget(back)
    assert back.journal is not None
    (back.journal.folder / "journal").write_bytes(b"\xc1 nonsense")
    before = look(tmp_path / "home")
    (event,) = recovered(tmp_path / "state")
    assert "damaged" in str(event.fields["left"]) and look(tmp_path / "home") == before


def test_a_file_that_is_replaced_while_content_is_fetched_is_not_lost(tmp_path: Path) -> None:
    back = written(lay_out(tmp_path), THEN, tmp_path / "state")
    home = tmp_path / "home"
    (home / "replaced.new").write_bytes(b"rotated in\n")
    (home / "replaced.new").rename(home / "replaced")
    before = look(home)
    with pytest.raises(RestoreFailed, match="was replaced while"):
        back.exchange()
    assert back.abandon() == []
    assert (home / "replaced").read_bytes() == b"rotated in\n"
    assert (home / "linked").read_bytes() == NEWER and not [
        name for name in os.listdir(home) if name.startswith(".")
    ]
    assert before["replaced"] == look(home)["replaced"]


def test_who_reads_a_file_keeps_what_he_has(tmp_path: Path) -> None:
    actions = lay_out(tmp_path)
    with open(tmp_path / "home" / "replaced", "rb") as reader:
        back = written(actions, THEN, tmp_path / "state")
        back.exchange()
        assert reader.read() == NEWER and (tmp_path / "home" / "replaced").read_bytes() == THEN
        back.hand_over()
        assert back.finish() == []
        assert reader.seek(0) == 0 and reader.read() == NEWER


def test_a_file_that_is_still_the_job_s_stays_the_same_inode(tmp_path: Path) -> None:
    actions = [action for action in lay_out(tmp_path) if action.keep]
    kept = tmp_path / "home" / "kept"
    inode = kept.stat().st_ino
    back = written(actions, THEN, tmp_path / "state")
    back.exchange()
    about = kept.stat()
    assert kept.read_bytes() == THEN and (about.st_ino, about.st_mtime_ns) == (inode, 10**18)
    assert (about.st_dev, inode) in back.inodes
    back.hand_over()
    assert back.finish() == [] and not list((tmp_path / "home").glob(".*"))


def test_a_kept_file_that_is_as_it_was_is_not_written(tmp_path: Path) -> None:
    actions = [action for action in lay_out(tmp_path) if action.keep]
    kept = tmp_path / "home" / "kept"
    kept.write_bytes(THEN)
    os.utime(kept, ns=(10**18, 10**18))
    changed = kept.stat().st_ctime_ns
    back = written(actions, THEN, tmp_path / "state")
    back.exchange()
    assert kept.stat().st_ctime_ns == changed and not list(
        (tmp_path / "state" / "restores").glob("*/*.saved")
    )
    assert back.abandon() == []


def test_files_that_are_kept_have_no_attributes_and_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved of them lies in the state directory, and a change of the content would remove
    security.capability.
    """
    files = []
    for name in ("first", "second", "third"):
        (tmp_path / name).write_bytes(THEN)
        files.append(recorded(tmp_path / name))
    os.setxattr(tmp_path / "first", "user.kind", b"tested")

    def kept() -> list[bool]:
        actions = plan_files(manifest_of(*files), "restore").actions
        return [action.keep for action in actions]

    assert kept() == [False, True, True]
    monkeypatch.setattr(plan, "_ALL_KEPT_BYTES", len(THEN) + 1)
    assert kept() == [False, True, False]


def test_holes_of_kept_files_stay_holes(tmp_path: Path) -> None:
    actions = [action for action in lay_out(tmp_path) if action.keep]
    kept = tmp_path / "home" / "kept"
    with open(kept, "r+b") as file:
        file.truncate(32 << 20)
        file.seek(16 << 20)
        file.write(b"in the middle")
    before = kept.read_bytes()
    back = written(actions, THEN, tmp_path / "state")
    back.exchange()
    (saved,) = (tmp_path / "state" / "restores").glob("*/*.saved")
    assert saved.stat().st_size == 32 << 20 and saved.stat().st_blocks * 512 < 4 << 20
    assert kept.read_bytes() == THEN
    assert back.abandon() == []
    assert kept.read_bytes() == before and kept.stat().st_blocks * 512 < 4 << 20


@pytest.mark.parametrize("what", ["linked", "another", "of another", "mode", "large"])
def test_when_a_file_is_replaced_by_another(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(THEN)
    file = recorded(path)
    assert can_keep(file, path.stat())
    if what == "linked":
        (tmp_path / "backup").hardlink_to(path)
    elif what == "another":
        path.rename(tmp_path / "old")
        path.write_bytes(THEN)
    elif what == "of another":
        os.chown(path, HOSTILE, HOSTILE)
    elif what == "mode":
        path.chmod(0o600 if path.stat().st_mode & 0o777 != 0o600 else 0o640)
    else:
        monkeypatch.setattr(plan, "_KEPT_BYTES", len(THEN) - 1)
    assert not can_keep(file, path.stat())


def test_a_job_that_was_never_let_go_has_its_files_undone_also_after_the_hand_over(
    tmp_path: Path,
) -> None:
    actions = lay_out(tmp_path)
    before = look(tmp_path / "home")
    back = written(actions, THEN, tmp_path / "state")
    back.exchange()
    back.hand_over()
    assert back.abandon() == [] == back.abandon()
    assert (
        look(tmp_path / "home") == before
        and list((tmp_path / "state" / "restores").iterdir()) == []
    )


def test_of_a_job_that_may_have_run_the_originals_are_left_and_named(tmp_path: Path) -> None:
    back = exchanged(tmp_path)
    back.hand_over()
    left = back.abandon(went=True)
    home = tmp_path / "home"
    (kept,) = [path for path in home.iterdir() if path.name.startswith(".")]
    assert (
        kept.read_bytes() == NEWER
        and f"what {home}/replaced was before the restore is {kept}" in left
    )
    (folder,) = (tmp_path / "state" / "restores").iterdir()
    assert left[-1] == f"what was saved is in {folder}"
    for name, file in (("grown", "2.saved"), ("link_remap.7", "3.saved")):
        (sentence,) = [sentence for sentence in left if f"{file}" in sentence]
        assert (folder / file).read_bytes() == NEWER and (name in sentence or "linked" in sentence)
    assert (home / "replaced").read_bytes() == THEN == (home / "grown").read_bytes()
    assert recovered(tmp_path / "state") == [] and kept.exists()


def test_of_a_job_that_ran_the_originals_are_removed(tmp_path: Path) -> None:
    back = exchanged(tmp_path)
    back.hand_over()
    assert back.abandon(went=True, ran=True) == []
    assert not [path for path in (tmp_path / "home").iterdir() if path.name.startswith(".")]


def test_nothing_to_do_leaves_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "read.only"
    path.write_bytes(THEN)
    then = recorded(path, writable=False, policy="checked")
    back = written(plan_files(manifest_of(then), "restore").actions, THEN, tmp_path / "state")
    assert not back and back.exchange() == []
    back.hand_over()
    assert back.finish() == [] == back.abandon()
    assert not (tmp_path / "state").exists()


def test_a_journal_that_others_could_have_written_is_not_believed(tmp_path: Path) -> None:
    forget(exchanged(tmp_path))
    (tmp_path / "state" / "restores").chmod(0o777)
    before = look(tmp_path)
    with pytest.raises(RestoreFailed, match="users other than 0 may write"):
        recovered(tmp_path / "state")
    assert look(tmp_path) == before


def test_journals_are_roots_alone(tmp_path: Path) -> None:
    journal = FileJournal.begin(tmp_path / "state")
    for folder in (journal.folder, journal.folder.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    journal.close()
    assert recovered(tmp_path / "state") == [] and not journal.folder.exists()

"""Open files put back: what is done to them, what stands in the way, and that a failure changes
nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import blake3
import msgspec
import pytest

from icecore.errors import Damaged, RestoreFailed
from icecore.restorer.files.plan import FilesMode, plan_files
from icecore.restorer.files.put_back import PutBack
from icecore.restorer.plan.cells import space_cells
from icecore.store.format.manifest import FilePolicy, Manifest
from tests.restorer.job_file_places import manifest_of, put_back, recorded, written

CONTENT = b"what the file held then\n" * 300


def prepared(manifest: Manifest, content: bytes, state: Path) -> PutBack:
    """Carry out the plan up to the exchange; every file to be written has ``content``."""
    return written(plan_files(manifest, "restore").actions, content, state)


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(CONTENT)
    path.chmod(0o640)
    return path


def test_a_changed_file_gets_its_content_mode_and_time_back(file: Path, state: Path) -> None:
    then = recorded(file)
    file.write_bytes(b"something else")
    file.chmod(0o600)
    before = file.stat().st_ino
    with open(file, "rb") as still_open:
        put_back(manifest_of(then), CONTENT, state)
        assert still_open.read() == b"something else", "who has it open keeps what he has"
    assert file.read_bytes() == CONTENT
    now = file.stat()
    assert (now.st_mode & 0o7777, now.st_mtime_ns, now.st_ino != before) == (
        0o640,
        then.mtime_ns,
        True,
    )
    assert [p.name for p in file.parent.iterdir()] == ["data.bin"]


def test_a_file_that_is_gone_comes_back_with_its_folders(file: Path, state: Path) -> None:
    nested = file.parent / "a" / "b" / "data.bin"
    nested.parent.mkdir(parents=True)
    file.rename(nested)
    then = recorded(nested)
    nested.unlink()
    nested.parent.rmdir()
    nested.parent.parent.rmdir()
    put_back(manifest_of(then), CONTENT, state)
    assert nested.read_bytes() == CONTENT


def test_until_the_commit_nothing_has_changed(file: Path, state: Path) -> None:
    then = recorded(file)
    file.write_bytes(b"now")
    back = prepared(manifest_of(then), CONTENT, state)
    assert file.read_bytes() == b"now"
    back.abandon()
    assert file.read_bytes() == b"now"
    assert [p.name for p in file.parent.iterdir()] == ["data.bin"]


def test_links_that_only_criu_would_have_removed_go_when_the_restore_fails(
    file: Path, state: Path
) -> None:
    link = file.with_name("link_remap.7")
    file.rename(link)
    then = recorded(link)
    link.unlink()
    back = prepared(manifest_of(then), CONTENT, state)
    back.exchange()
    assert link.read_bytes() == CONTENT
    back.abandon()
    assert list(file.parent.iterdir()) == []


def test_a_file_that_grew_is_cut(file: Path, state: Path) -> None:
    then = recorded(file)
    with open(file, "ab") as out:
        out.write(b"more")
    inode = file.stat().st_ino
    put_back(manifest_of(then), b"", state, "truncate")
    assert file.read_bytes() == CONTENT and file.stat().st_ino == inode


@pytest.mark.parametrize(
    ("mode", "policy", "writable", "change", "problem"),
    [
        ("restore", "checked", False, "touch", "modified"),
        ("restore", "checked", False, "grow", "bytes"),
        ("restore", "checked", False, "remove", "missing"),
        ("restore", "content", False, "grow", None),
        ("restore", "content", True, "remove", None),
        ("restore", "checked", True, "touch", None),
        ("restore", "checked", True, "grow", "bytes"),
        ("restore", "absent", True, "remove", None),
        ("restore", "content", True, "folder", "not a regular file"),
        ("truncate", "content", True, "grow", None),
        ("truncate", "content", True, "shrink", "bytes"),
        ("truncate", "content", True, "remove", "missing"),
        ("leave", "content", True, "grow", "bytes"),
        ("leave", "checked", False, "touch", None),
    ],
)
def test_what_stands_in_the_way(
    file: Path,
    mode: FilesMode,
    policy: FilePolicy,
    writable: bool,
    change: str,
    problem: str | None,
) -> None:
    then = recorded(file, writable=writable, policy=policy)
    if change == "touch":
        os.utime(file, ns=(0, 0))
    elif change == "grow":
        file.write_bytes(CONTENT + b"more")
    elif change == "shrink":
        file.write_bytes(CONTENT[:-1])
    else:
        file.unlink()
        if change == "folder":
            file.mkdir()
    plan = plan_files(manifest_of(then), mode)
    if problem is None:
        assert plan.problems == []
    else:
        (found,) = plan.problems
        assert problem in found.message and found.path == str(file) and found.cure


def test_the_hash_decides_when_the_time_does_not(file: Path, state: Path) -> None:
    then = recorded(
        file, writable=False, policy="checked", digest=blake3.blake3(CONTENT).hexdigest()
    )
    os.utime(file, ns=(0, 0))
    assert plan_files(manifest_of(then), "restore", verify=True).problems == []
    assert plan_files(manifest_of(then), "restore", verify=False).problems != []
    file.write_bytes(CONTENT[::-1])
    assert plan_files(manifest_of(then), "restore", verify=True).problems != []


def test_files_of_the_new_instance_are_left_alone(file: Path, state: Path) -> None:
    then = recorded(file)
    file.unlink()
    assert plan_files(manifest_of(then), "restore", skip={str(file)}).actions == []


def test_a_path_that_is_no_path_is_damage(file: Path, state: Path) -> None:
    then = msgspec.structs.replace(recorded(file), path="relative/name")
    with pytest.raises(Damaged, match="relative/name"):
        PutBack(
            plan_files(manifest_of(then), "restore").actions,
            lambda path: space_cells([], []),
            state,
        )


def test_a_folder_that_cannot_be_made_is_named(file: Path, state: Path) -> None:
    then = msgspec.structs.replace(recorded(file), path=str(file / "below" / "data.bin"))
    manifest = manifest_of(then)
    plan = plan_files(manifest, "restore")
    assert plan.problems, "a file stands where a folder is needed"
    actions = plan_files(
        manifest_of(msgspec.structs.replace(then, path="/proc/nowhere/data.bin")), "restore"
    ).actions
    with pytest.raises(RestoreFailed, match="/proc/nowhere"):
        PutBack(actions, lambda path: space_cells([], []), state).prepare()

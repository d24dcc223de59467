"""Writes to a job's files stay where they belong, whatever the owner of a directory makes of its
names.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from icecore.errors import Damaged, IcecoreError, RestoreFailed
from icecore.host.kernel import filesystem
from icecore.restorer.files import jobfiles
from icecore.restorer.files.jobfiles import JobFiles
from icecore.restorer.files.jobpaths import JobPaths, PathRefused
from icecore.restorer.files.plan import Action, plan_files
from icecore.restorer.files.rights import Owner, as_allowed, inode_of
from tests.restorer.job_file_places import HOSTILE, look, manifest_of, put_back, recorded, written

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")

CONTENT = b"what the file held then\n" * 300


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of root's, with files that nobody else may change."""
    folder = tmp_path / "victim"
    folder.mkdir(mode=0o755)
    for name in ("data.bin", "secret"):
        (folder / name).write_bytes(b"root's own, longer than what the job had\n" * 900)
        (folder / name).chmod(0o600)
        os.utime(folder / name, ns=(1, 1))
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory of the hostile user's, with a file of his that a job had open."""
    folder = tmp_path / "home" / "dir"
    folder.mkdir(parents=True)
    (folder / "data.bin").write_bytes(CONTENT)
    for path in (folder, folder.parent, folder / "data.bin"):
        os.chown(path, HOSTILE, HOSTILE)
    return folder


@pytest.mark.parametrize("mode", ["restore", "truncate"])
@pytest.mark.parametrize("planned", [True, False], ids=["before the plan", "after it"])
def test_a_link_in_place_of_the_file_leads_nowhere(
    home: Path, victim: Path, state: Path, mode: str, planned: bool
) -> None:
    file = home / "data.bin"
    then = recorded(file)
    file.unlink()
    file.symlink_to(victim / "secret")
    before = look(victim)
    if planned:
        (problem,) = plan_files(manifest_of(then), mode).problems  # type: ignore[arg-type]
        assert "symbolic link" in problem.message and problem.cure
    else:
        with pytest.raises(RestoreFailed, match="symbolic link"):
            put_back(manifest_of(then), CONTENT, state, mode, planned=False)  # type: ignore[arg-type]
    assert look(victim) == before
    assert list(home.iterdir()) == [file]


@pytest.mark.parametrize("mode", ["restore", "truncate"])
def test_a_link_in_place_of_the_directory_leads_nowhere(
    home: Path, victim: Path, state: Path, mode: str
) -> None:
    then = recorded(home / "data.bin")
    home.rename(home.with_name("away"))
    home.symlink_to(victim)
    before = look(victim)
    with pytest.raises(PathRefused, match="symbolic link 'dir'") as refused:
        put_back(manifest_of(then), CONTENT, state, mode, planned=False)  # type: ignore[arg-type]
    assert refused.value.cure
    assert look(victim) == before


def test_a_directory_that_is_swapped_while_content_is_fetched_changes_nothing_elsewhere(
    home: Path, victim: Path, state: Path
) -> None:
    then = recorded(home / "data.bin")
    before = look(victim)
    back = written([Action("replace", then)], CONTENT[::-1], state)
    home.rename(home.with_name("away"))
    home.symlink_to(victim)
    back.exchange()
    back.hand_over()
    assert back.finish() == []
    assert look(victim) == before
    assert (home.with_name("away") / "data.bin").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("mode", ["restore", "truncate"])
def test_a_hard_link_to_another_users_file_is_not_written_to(
    home: Path, victim: Path, state: Path, mode: str
) -> None:
    file = home / "data.bin"
    then = recorded(file)
    file.unlink()
    os.link(victim / "secret", file)
    before = look(victim)
    if mode == "truncate":
        with pytest.raises(RestoreFailed, match="belongs to user 0"):
            put_back(manifest_of(then), CONTENT, state, "truncate")
    else:
        put_back(manifest_of(then), CONTENT, state)
        assert file.stat().st_uid == HOSTILE
    assert look(victim) == before


@pytest.mark.parametrize("mode", ["leave", "truncate", "restore"])
def test_another_users_file_is_not_given_to_the_job(home: Path, victim: Path, mode: str) -> None:
    """Nothing would be written: CRIU would open it as root, and the job would have what it may not
    read.
    """
    file = home / "data.bin"
    then = recorded(file, writable=False, policy="checked")
    secret = victim / "secret"
    secret.write_bytes(CONTENT)
    os.utime(secret, ns=(then.mtime_ns, then.mtime_ns))
    file.unlink()
    os.link(secret, file)
    (problem,) = plan_files(manifest_of(then), mode).problems  # type: ignore[arg-type]
    assert "belongs to user 0" in problem.message and "chown" in problem.cure
    secret.chmod(0o644)
    assert plan_files(manifest_of(then), mode).problems == [], "everybody may read that"  # type: ignore[arg-type]


def test_a_file_of_an_imported_snapshot_is_cut_for_its_present_owner(
    home: Path, victim: Path, state: Path
) -> None:
    file = home / "data.bin"
    then = msgspec.structs.replace(
        recorded(file), inode=0, device=0, user=0, group=0, mtime_ns=0, policy="checked", size=10
    )
    put_back(manifest_of(then), b"", state, "truncate")
    assert file.read_bytes() == CONTENT[:10] and file.stat().st_uid == HOSTILE
    file.unlink()
    os.link(victim / "secret", file)
    before = look(victim)
    with pytest.raises(RestoreFailed, match="has other names"):
        put_back(manifest_of(then), b"", state, "truncate")
    assert look(victim) == before


def test_another_name_that_is_another_users_file_is_not_rewritten(
    home: Path, victim: Path, state: Path
) -> None:
    """The recorded inode number is that of root's file: only the owner tells them apart."""
    secret = (victim / "secret").stat()
    link = home / "link_remap.1"
    other = home / "other"
    os.link(victim / "secret", other)
    then = msgspec.structs.replace(
        recorded(home / "data.bin"),
        path=str(link),
        links=[str(other)],
        inode=secret.st_ino,
        device=secret.st_dev,
    )
    before = look(victim)
    with pytest.raises(RestoreFailed, match="belongs to user 0"):
        put_back(manifest_of(then), CONTENT, state)
    assert look(victim) == before and not link.exists()


def test_the_root_of_a_job_is_not_left(tmp_path: Path, victim: Path, state: Path) -> None:
    root = tmp_path / "root"
    (root / "job").mkdir(parents=True)
    file = root / "job" / "data.bin"
    file.write_bytes(CONTENT)
    then = recorded(file, root=str(root))
    file.unlink()
    before = look(victim)
    (root / "job").rmdir()
    # Whether absolute or relative, the link ends within the root; the directories that it names
    # there are the job's.
    for target, inside in (
        (str(victim), root / str(victim).lstrip("/")),
        ("../../victim", root / "victim"),
    ):
        (root / "job").symlink_to(target)
        with pytest.raises(RestoreFailed, match="leads nowhere"):
            put_back(manifest_of(then), CONTENT, state, root=str(root))
        inside.mkdir(parents=True)
        put_back(manifest_of(then), CONTENT, state, root=str(root))
        assert (inside / "data.bin").read_bytes() == CONTENT
        (root / "job").unlink()
    assert look(victim) == before


@pytest.mark.parametrize("what", ["fifo", "device", "socket", "folder"])
def test_what_is_no_regular_file_neither_blocks_nor_is_written_to(
    home: Path, state: Path, what: str
) -> None:
    file = home / "data.bin"
    then = recorded(file)
    file.unlink()
    if what == "fifo":
        os.mkfifo(file)
    elif what == "device":
        os.mknod(file, 0o20666, os.makedev(1, 7))  # /dev/full
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(file))
    else:
        file.mkdir()
    before = look(home)
    assert "not a regular file" in plan_files(manifest_of(then), "restore").problems[0].message
    for mode in ("restore", "truncate"):
        with pytest.raises(RestoreFailed, match="not a regular file"):
            put_back(manifest_of(then), CONTENT, state, mode, planned=False)  # type: ignore[arg-type]
    assert look(home) == before


def test_files_are_their_owners_from_the_start(home: Path, state: Path) -> None:
    then = recorded(home / "data.bin")
    back = written([Action("replace", then)], CONTENT, state)
    (made,) = [path for path in home.iterdir() if path.name.startswith(".")]
    assert (made.stat().st_uid, made.stat().st_gid, made.stat().st_mode & 0o777) == (
        HOSTILE,
        HOSTILE,
        0o600,
    )
    assert back.abandon() == []


def test_what_the_owner_may_not_do_root_does_only_where_nobody_else_can(
    home: Path, tmp_path: Path, state: Path
) -> None:
    mine = tmp_path / "log"
    mine.mkdir(mode=0o755)
    for folder, allowed in ((mine, True), (home, False)):
        file = folder / "other.log"
        file.write_bytes(CONTENT)
        os.chown(file, HOSTILE + 1, HOSTILE + 1)
        then = recorded(file)
        file.unlink()
        if allowed:
            put_back(manifest_of(then), CONTENT, state)
            assert file.stat().st_uid == HOSTILE + 1
            continue
        before = look(home)
        with pytest.raises(RestoreFailed, match=r"Permission denied|may not"):
            put_back(manifest_of(then), CONTENT, state)
        assert look(home) == before


def test_directories_that_are_made_belong_to_the_files_owner(
    tmp_path: Path, home: Path, state: Path
) -> None:
    for top in (tmp_path, home):
        nested = top / "a" / "b" / "data.bin"
        then = msgspec.structs.replace(recorded(home / "data.bin"), path=str(nested))
        put_back(manifest_of(then), CONTENT, state)
        for folder in (nested.parent, nested.parent.parent):
            about = folder.stat()
            assert (about.st_uid, about.st_gid, about.st_mode & 0o7777) == (HOSTILE, HOSTILE, 0o755)


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6755, 0o2644])
def test_set_id_bits_are_not_put_back_and_that_is_said(home: Path, state: Path, mode: int) -> None:
    file = home / "data.bin"
    then = msgspec.structs.replace(recorded(file), mode=mode)
    assert put_back(manifest_of(then), CONTENT, state) == [str(file)]
    assert file.stat().st_mode & 0o7777 == mode & 0o777


def test_links_that_root_alone_can_make_are_followed(tmp_path: Path, state: Path) -> None:
    root = tmp_path / "root"
    (root / "data" / "home" / "job").mkdir(parents=True)
    (root / "home").symlink_to("data/home")
    (root / "var").mkdir()
    (root / "var" / "job").symlink_to("/data/../data/home/job")
    file = root / "data" / "home" / "job" / "data.bin"
    file.write_bytes(CONTENT)
    then = recorded(file)
    for path in ("/home/job/data.bin", "/var/job/data.bin", "/data/home/job/data.bin"):
        file.write_bytes(b"newer")
        put_back(
            manifest_of(msgspec.structs.replace(then, path=path)), CONTENT, state, root=str(root)
        )
        assert file.read_bytes() == CONTENT
    (root / "data" / "home" / "last").symlink_to("job/data.bin")
    put_back(
        manifest_of(msgspec.structs.replace(then, path="/home/last")),
        CONTENT[::-1],
        state,
        root=str(root),
    )
    assert file.read_bytes() == CONTENT[::-1] and (root / "data" / "home" / "last").is_symlink()


@pytest.mark.parametrize(
    "how",
    [
        "owner of the link",
        "owner of its directory",
        "group may write",
        "everybody may write",
        "a directory above",
    ],
)
def test_links_that_others_can_make_or_move_are_refused(tmp_path: Path, how: str) -> None:
    root = tmp_path / "root"
    folder = root / "above" / "folder"
    (root / "data").mkdir(parents=True)
    folder.mkdir(parents=True)
    (folder / "link").symlink_to("/data")
    with JobPaths(str(root)) as paths:
        assert paths.directory("/above/folder/link").inode == (root / "data").stat().st_ino
    if how == "owner of the link":
        os.chown(folder / "link", HOSTILE, HOSTILE, follow_symlinks=False)
    elif how == "owner of its directory":
        os.chown(folder, HOSTILE, HOSTILE)
    elif how == "a directory above":
        os.chown(folder.parent, HOSTILE, HOSTILE)
    else:
        folder.chmod(0o775 if how == "group may write" else 0o1777)
    with JobPaths(str(root)) as paths, pytest.raises(PathRefused, match="'link'"):
        paths.directory("/above/folder/link")


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "loop").symlink_to("/loop")
    with JobPaths(str(root)) as paths, pytest.raises(OSError, match="symbolic links"):
        paths.directory("/loop")


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a/./b", "/a//b", "/a/", "/nul\0", ""])
def test_a_path_that_the_kernel_never_shows_is_damage(path: str) -> None:
    with JobPaths() as paths, pytest.raises(Damaged):
        paths.locate(path)


def test_only_one_thread_acts_as_the_owner_and_only_meanwhile(home: Path) -> None:
    def identity() -> str:
        text = Path("/proc/thread-self/status").read_text()
        return "\n".join(
            line
            for line in text.splitlines()
            if line.startswith(("Uid", "Gid", "Groups", "CapEff"))
        )

    before = identity()
    seen: list[str] = []
    owner = Owner(HOSTILE, HOSTILE)
    with JobFiles() as files:
        place = files.locate(str(home / "new"))
        inside = files._do(lambda: as_allowed(place.directory, owner, identity))
        assert inside.splitlines()[0].split()[-1] == str(HOSTILE) and identity() == before
        with pytest.raises(FileExistsError):
            files.create(files.locate(str(home / "data.bin")), owner)
        seen.append(files._do(identity))
    assert seen == [before]


@pytest.mark.parametrize("number", jobfiles.UNSUPPORTED)
def test_a_file_system_that_cannot_exchange_names_is_served_all_the_same(
    home: Path, state: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def rename(directory: int, old: str, new: str, flags: int = 0) -> None:
        if flags:
            raise OSError(number, os.strerror(number))
        filesystem.rename(directory, old, new)

    monkeypatch.setattr(jobfiles, "rename", rename)
    file = home / "data.bin"
    then = recorded(file)
    gone = msgspec.structs.replace(then, path=str(home / "gone.bin"))
    file.write_bytes(b"newer")
    before = look(home)
    back = written(plan_files(manifest_of(then, gone), "restore").actions, CONTENT, state)
    back.exchange()
    assert file.read_bytes() == CONTENT == (home / "gone.bin").read_bytes()
    assert back.abandon() == []
    assert look(home) == before
    put_back(manifest_of(then, gone), CONTENT, state)
    assert file.read_bytes() == CONTENT and sorted(os.listdir(home)) == ["data.bin", "gone.bin"]


def test_an_inode_is_opened_only_if_it_is_that_one(home: Path) -> None:
    with JobFiles() as files:
        place = files.locate(str(home / "data.bin"))
        known = inode_of(os.stat(home / "data.bin"))
        os.close(files.open_inode(place, known, HOSTILE, os.O_RDWR))
        for wrong, owner in ((known._replace(inode=1), HOSTILE), (known, 0)):
            with pytest.raises(PathRefused):
                files.open_inode(place, wrong, owner, os.O_RDWR)


def test_journals_are_kept_only_where_root_alone_writes(home: Path, state: Path) -> None:
    then = recorded(home / "data.bin")
    (state / "restores").mkdir(parents=True)
    os.chown(state / "restores", HOSTILE, HOSTILE)
    with pytest.raises(IcecoreError, match="users other than 0 may write"):
        put_back(manifest_of(then), CONTENT, state)

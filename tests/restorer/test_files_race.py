"""Hostile users change what names mean while files are put back: nothing outside of their own
directories changes, and nothing of root's comes to them.

``ICECORE_TORTURE_SECONDS`` says how long the long run takes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from icecore.errors import IcecoreError
from icecore.restorer.files.file_recovery import recover
from icecore.restorer.files.plan import Action, plan_files
from icecore.restorer.files.surroundings import plan_surroundings
from icecore.store.format.manifest import OpenFile
from icecore.store.format.surroundings import Fifo, Folder, SmallFile, SocketName, Surroundings
from tests.restorer import hostile
from tests.restorer.job_file_places import HOSTILE, look, manifest_of, recorded, written

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")

CONTENT = b"what the file held then\n" * 300
SECRET = b"nobody else may read this\n" * 500
NOBODY = 65534


@contextmanager
def attackers(home: Path, shared: Path, victim: Path, pause: float = 0.0) -> Iterator[None]:
    """Run two of them, each of a user of its own; the first owns the home. With a ``pause`` they
    let much through.
    """
    with ExitStack() as stack:
        processes = []
        for user in (HOSTILE, NOBODY):
            words = [
                sys.executable,
                "-I",
                "-S",
                str(Path(hostile.__file__)),
                str(user),
                str(home),
                str(shared),
                str(victim),
                str(pause),
            ]
            processes.append(subprocess.Popen(words, stdin=subprocess.PIPE))
            stack.callback(processes[-1].kill)
        yield
        for process in processes:
            assert process.stdin is not None and process.poll() is None, (
                "an attacker ended by itself"
            )
            process.stdin.close()
            assert process.wait(20) == 0


class Ground:
    """The directories of a race, and what a job had open in them."""

    def __init__(self, top: Path) -> None:
        self.home, self.shared, self.victim, self.state = (
            top / name for name in ("home", "shared", "victim", "state")
        )
        self.outside = top / "outside"
        (self.home / "dir").mkdir(parents=True)
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        (self.victim / "sub").mkdir(parents=True)
        self.outside.mkdir()
        names = (
            "data.bin",
            "grown.bin",
            "linked.bin",
            "link_remap.7",
            "root.bin",
            "secret",
            "sub/new.bin",
        )
        for place in (*(self.victim / name for name in names), self.outside / "data.bin"):
            place.write_bytes(SECRET)
            place.chmod(0o600)
            os.utime(place, ns=(1, 1))
        self.files = self._recorded()

    def _recorded(self) -> list[OpenFile]:
        found = []
        for place, user in (
            (self.home / "dir" / "data.bin", HOSTILE),
            (self.home / "dir" / "root.bin", 0),
            (self.home / "dir" / "linked.bin", HOSTILE),
            (self.home / "dir" / "grown.bin", HOSTILE),
            (self.shared / "data.bin", HOSTILE),
        ):
            place.write_bytes(CONTENT)
            os.chown(place, user, user)
            found.append(recorded(place))
        for folder in (self.home, self.home / "dir"):
            os.chown(folder, HOSTILE, HOSTILE)
        data, root, linked, grown, shared = found
        # As if the recorded inode were that of root's file: only its owner tells.
        secret = (self.victim / "secret").stat()
        folder = self.home / "dir"
        rewritten = msgspec.structs.replace(
            linked,
            path=str(folder / "link_remap.7"),
            links=[str(folder / "linked.bin"), str(folder / "data.bin")],
            inode=secret.st_ino,
        )
        new = msgspec.structs.replace(data, path=str(folder / "sub" / "new.bin"), mode=0o6755)
        return [data, root, rewritten, grown, shared, new]

    def actions(self) -> list[Action]:
        """What a restore would do, by the plan or as if the plan had been made before."""
        chosen = random.sample(self.files, random.randrange(1, len(self.files) + 1))
        if random.random() < 0.5:
            mode = random.choice(["restore", "truncate"])
            return plan_files(manifest_of(*chosen), mode).actions  # type: ignore[arg-type]
        kinds = {
            "link_remap.7": ["rewrite"],
            "grown.bin": ["truncate", "replace"],
            "new.bin": ["create", "replace"],
        }
        return [
            Action(
                random.choice(kinds.get(Path(file.path).name, ["replace", "create", "truncate"])),
                file,
            )
            for file in chosen
        ]  # type: ignore[arg-type]

    def surroundings(self) -> tuple[list[Action], list[Folder], list[SocketName]]:
        """What a restore would make around files; perhaps nothing."""
        folder = str(self.home / "dir")
        owner = (HOSTILE, HOSTILE)
        folders = [
            Folder(f"{folder}/made", 0o2755, *owner, 1),
            Folder(f"{folder}/made/in", 0o500, *owner, 1),
            Folder(f"{folder}/made/roots", 0o700, 0, 0, 1),
        ]
        small = [
            SmallFile(f"{folder}/made/in/job.pid", 0o644, *owner, 1, "MTIK"),
            SmallFile(f"{self.shared}/job.pid", 0o644, *owner, 1, "MTIK"),
        ]
        fifos = [Fifo(f"{folder}/fifo", 0o666, *owner), Fifo(f"{folder}/made/fifo", 0o600, *owner)]
        plan = plan_surroundings(
            Surroundings(
                [one for one in folders if random.random() < 0.7],
                [one for one in fifos if random.random() < 0.7],
                [SocketName(f"{folder}/made/socket", 0o600, *owner)],
                [one for one in small if random.random() < 0.7],
            ),
            "restore",
        )
        return plan.actions, list(plan.folders), list(plan.sockets)

    def restore(self) -> str:
        """One restore, with a random end."""
        try:
            around, folders, sockets = self.surroundings()
            back = written(
                [*self.actions(), *around],
                CONTENT,
                self.state,
                folders=folders,
                sockets=sockets,
            )
        except IcecoreError as error:
            return f"refused: {type(error).__name__}"
        try:
            back.exchange()
            outcome = random.choice(["runs", "fails", "killed", "killed as it runs"])
            if outcome in ("runs", "killed as it runs"):
                back.hand_over()
        except IcecoreError as error:
            back.abandon()
            return f"broke: {type(error).__name__}"
        if outcome == "runs":
            back.finish()
        elif outcome == "fails":
            back.abandon()
        elif back.journal is not None:
            back.journal.close()
            recover(self.state)
        return outcome

    def assert_nothing_of_roots_is_theirs(self) -> None:
        """No file that a user can read has root's content, but root's own file under another name."""
        for folder in (self.home, self.shared):
            for place in folder.rglob("*"):
                about = place.lstat()
                if (
                    os.path.isfile(place)
                    and not place.is_symlink()
                    and (about.st_uid != 0 or about.st_mode & 0o077)
                ):
                    assert SECRET[:100] not in place.read_bytes(), (
                        f"{place} has root's content, and is {oct(about.st_mode)} of {about.st_uid}"
                    )
                # A directory gives no identity to anybody; in a set-GID one the kernel hands the
                # bit down.
                if not place.is_symlink() and not place.is_dir():
                    assert not about.st_mode & 0o6000, f"{place} has a set-ID bit"


@pytest.fixture
def ground() -> Iterator[Ground]:
    """In a directory that other users can get into, as those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="icecore-race-") as top:
        os.chmod(top, 0o755)
        yield Ground(Path(top))


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(6.0, id="short"),
        pytest.param(
            float(os.environ.get("ICECORE_TORTURE_SECONDS", "300")),
            id="long",
            marks=[pytest.mark.torture, pytest.mark.timeout(7200)],
        ),
    ],
)
def test_hostile_users_gain_nothing_while_files_are_put_back(
    ground: Ground, seconds: float
) -> None:
    before = look(ground.victim), look(ground.outside)
    outcomes: Counter[str] = Counter()
    with attackers(ground.home, ground.shared, ground.victim):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            outcomes[ground.restore()] += 1
            if sum(outcomes.values()) % 50 == 0:
                assert (look(ground.victim), look(ground.outside)) == before, outcomes
    print(f"{seconds:.0f} s: {dict(outcomes)}")
    assert (look(ground.victim), look(ground.outside)) == before, outcomes
    ground.assert_nothing_of_roots_is_theirs()
    # The race was one: restores went through, and others met what the attackers had put there.
    assert (
        outcomes["runs"]
        and outcomes["fails"]
        and outcomes["killed"]
        and sum(outcomes[key] for key in outcomes if ":" in key) > 5
    ), outcomes

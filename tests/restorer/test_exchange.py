"""Import and export: a directory of plain CRIU goes in, a directory for plain CRIU comes out."""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path

import numpy as np
import pytest

from icecore.dumper.importer import import_images
from icecore.dumper.memory.images import image_files
from icecore.errors import Damaged, NotFound, ObjectMissing, UsageError
from icecore.events import Event
from icecore.host.criu.pagemap_image import load_pagemap
from icecore.restorer.files.exporter import export
from icecore.sizes import PAGE
from icecore.store.maintenance.gc import Collector
from icecore.store.snapshot.reader import SnapshotReader
from tests.programs import driving, plain_criu
from tests.restorer.criu_place import await_gone, criu_or_skip, dumped

pytestmark = pytest.mark.criu


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def content_by_address(folder: Path, pid: int) -> dict[int, bytes]:
    """Every page of a process's images."""
    pages_id, entries = load_pagemap(folder / f"pagemap-{pid}.img")
    data = (folder / f"pages-{pages_id}.img").read_bytes()
    found, at = {}, 0
    for entry in entries:
        for k in range(int(entry["pages"])):
            found[int(entry["address"]) + k * PAGE] = data[at : at + PAGE]
            at += PAGE
    assert at == len(data)
    return found


@pytest.mark.parametrize("name", ["memory-pattern", "tree", "sparse", "many-vmas"])
def test_what_comes_out_is_what_went_in_and_plain_criu_restores_it(
    tmp_path: Path, cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dumped(name, tmp_path, cache) as it:
        driving.forget(tmp_path)
        out = it.place.root.parent / "exported"
        told: list[Event] = []
        monkeypatch.setattr("icecore.events._PROGRESS_SECONDS", 0.0)
        result = export(
            it.place.repository, it.place.loop, it.result.snapshot, out, emit=told.append
        )
        pages = max(
            event.fields["bytes"] for event in told if event.fields.get("state") == "progress"
        )  # type: ignore[type-var]
        assert {event.fields["snapshot"] for event in told if event.name == "export.write"} == {
            it.result.snapshot
        }
        assert pages == {event.fields["total"] for event in told if "total" in event.fields}.pop()
        for path in image_files(it.images):
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
        for path in it.images.glob("pages-*.img"):
            assert filecmp.cmp(path, out / path.name, shallow=False), path.name
        assert result.bytes == sum(p.stat().st_size for p in out.iterdir())
        plain_criu.restore(it.criu.path, out, it.program.restore_options)
        driving.wait_progress(tmp_path)
        assert it.verdict().passed


def test_three_successive_dumps_share_what_did_not_change(tmp_path: Path, cache: Path) -> None:
    criu = criu_or_skip()
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "64")) as it:
        results = [it.result]
        folder = it.images
        for number in (1, 2):
            driving.forget(tmp_path)
            pid = plain_criu.restore(criu.path, folder, ())
            driving.wait_progress(tmp_path)
            changed = driving.change(tmp_path, number, 10, 20)
            assert changed > 0
            folder = it.place.root.parent / f"images-{number}"
            folder.mkdir()
            plain_criu.dump(criu.path, pid, folder, ())
            results.append(import_images(it.place.repository, it.place.loop, folder))
        first, second, third = results
        assert second.parent == first.snapshot and third.parent == second.snapshot
        assert first.lineage == second.lineage == third.lineage
        assert first.sizes.stored > 60 << 20
        for later in (second, third):
            assert later.sizes.logical > 60 << 20
            assert later.sizes.changed < 16 << 20, "about a tenth of the cells"
            assert later.sizes.stored < 6 << 20, "about a fiftieth of the pages"
        # Each is whole by itself, whatever it shares.
        for number, result in enumerate(results):
            out = it.place.root.parent / f"out-{number}"
            export(it.place.repository, it.place.loop, result.snapshot, out)
            source = it.images if number == 0 else it.place.root.parent / f"images-{number}"
            assert content_by_address(out, it.running.pid) == content_by_address(
                source, it.running.pid
            )


def test_importing_the_same_again_stores_nothing(tmp_path: Path, cache: Path) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "32")) as it:
        again = import_images(it.place.repository, it.place.loop, it.images)
        assert again.sizes.changed == 0 and again.sizes.stored == 0
        other = import_images(it.place.repository, it.place.loop, it.images, "another-job")
        assert other.lineage != it.result.lineage and other.parent == ""
        # The index finds what is the same in other lineages.
        assert other.sizes.stored == 0


def test_the_manifest_says_what_the_images_say_of_processes(tmp_path: Path, cache: Path) -> None:
    with dumped("tree", tmp_path, cache) as it:
        manifest = it.place.run(it.place.repository.manifest(it.result.snapshot))
        root, *others = manifest.processes
        assert manifest.root_pid == root.image_id == it.running.pid
        assert str(tmp_path) in root.command and "python" in root.executable
        assert others and all(process.parent for process in others)
        assert {process.user for process in manifest.processes} == {0}
        paths = {file.path: file for file in manifest.files}
        assert paths[root.executable].policy == "checked" and not paths[root.executable].writable
        assert any(file.writable for file in manifest.files)
        threads = sum(max(1, process.threads) for process in manifest.processes)
        assert {process.image_id for process in manifest.processes} <= set(
            manifest.requirements.pids
        )
        assert len(manifest.requirements.pids) == threads


def test_pages_of_private_memory_are_left_out_where_they_are_zero_and_come_back(
    tmp_path: Path, cache: Path
) -> None:
    with dumped("sparse", tmp_path, cache) as it:
        reader = SnapshotReader(
            it.place.repository, it.place.run(it.place.repository.manifest(it.result.snapshot))
        )
        assert it.result.sizes.zero > 0
        for space in reader.manifest.spaces:
            for region, records in zip(space.regions, reader.records(space), strict=True):
                if not region.lazy:
                    assert not np.any(records["zero"]), (
                        "only private anonymous memory may lose its zero pages"
                    )


def test_what_is_no_image_directory_is_refused(tmp_path: Path, cache: Path) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "8")) as it:
        place = it.place
        with pytest.raises(NotFound, match="no image directory"):
            import_images(place.repository, place.loop, tmp_path)
        broken = it.place.root.parent / "broken"
        shutil.copytree(it.images, broken)
        (broken / "parent").symlink_to("../elsewhere")
        with pytest.raises(UsageError, match="incremental"):
            import_images(place.repository, place.loop, broken)
        (broken / "parent").unlink()
        (pages,) = broken.glob("pages-1.img")
        with open(pages, "ab") as file:
            file.truncate(pages.stat().st_size - PAGE)
        with pytest.raises(Damaged, match=r"pages-1\.img"):
            import_images(place.repository, place.loop, broken)
        (broken / f"mm-{it.running.pid}.img").unlink()
        with pytest.raises(Damaged, match="mm-"):
            import_images(place.repository, place.loop, broken)
        with pytest.raises(NotFound, match="no snapshot"):
            import_images(place.repository, place.loop, it.images, parent="0" * 32)
        assert len(place.run(place.repository.snapshots())) == 1
        full = tmp_path / "full"
        full.mkdir()
        (full / "something").touch()
        with pytest.raises(UsageError, match="not empty"):
            export(place.repository, place.loop, it.result.snapshot, full)
        assert [p.name for p in full.iterdir()] == ["something"]


def test_a_failed_export_leaves_an_empty_directory(tmp_path: Path, cache: Path) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "8")) as it:
        for shard in (it.place.root / "shards").rglob("*"):
            if shard.is_file():
                shard.chmod(0o600)
                data = bytearray(shard.read_bytes())
                data[len(data) // 2] ^= 1
                shard.write_bytes(data)
        out = tmp_path / "out"
        with pytest.raises(Damaged):
            export(it.place.repository, it.place.loop, it.result.snapshot, out)
        assert list(out.iterdir()) == []
        await_gone([])


@pytest.mark.parametrize("register", [True, False])
def test_a_collection_beside_an_export(tmp_path: Path, cache: Path, register: bool) -> None:
    """The snapshot is forgotten and everything collected while it is read: one that is registered
    gets all, another nothing.
    """
    with dumped("memory-pattern", tmp_path, cache) as it:
        driving.forget(tmp_path)
        place, out = it.place, tmp_path / "out"
        collected: list[int] = []

        def collect(event: Event) -> None:
            if event.name == "export.write" and event.fields.get("state") == "begin":
                place.loop.run(place.repository.forget([it.result.snapshot]))
                collected.append(place.loop.run(Collector(place.repository).collect()).deleted)

        if register:
            export(place.repository, place.loop, it.result.snapshot, out, emit=collect)
            assert collected == [0] and (out / "inventory.img").exists()
            return
        with pytest.raises(ObjectMissing):
            export(
                place.repository, place.loop, it.result.snapshot, out, register=False, emit=collect
            )
        assert collected[0] > 0 and list(out.iterdir()) == []

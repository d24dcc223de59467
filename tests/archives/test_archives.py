"""Checkpoint archives of container engines: stored by address, exported byte for byte, told apart."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.archives import making
from tests.cli.conftest import Cli
from tests.cli.documents import check_event, documented_events

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two image directories of one tree, between which one page was changed."""
    folder = tmp_path_factory.mktemp("tree")
    with making.tree(folder) as tree:
        first = tree.dump("first")
        tree.change(1)
        return [first, tree.dump("second")]


def test_what_comes_back_is_the_archive(cli: Cli, images: list[Path]) -> None:
    """All layouts and compressions: same members, metadata and bytes; `show` and `ls` name the
    container.
    """
    cli.run("init")
    for make, how, name, title in (
        (making.podman, "gzip", "web", "web (localhost/web:1, runc, libpod)"),
        (
            making.crio,
            "none",
            "counters-counter",
            "counters/counter (quay.io/example/counter:latest, crun, cri-o)",
        ),
        (
            making.containerd,
            "zstd",
            "cache-0-redis",
            "cache-0/redis (docker.io/library/redis:7, runc, containerd)",
        ),
    ):
        tar = make(images[0])
        source = cli.folder / f"{name}.tar"
        source.write_bytes(making.compressed(tar, how))
        for event in (events := cli.events("import", source.name)):
            check_event(event, documented_events())
        assert events[-1]["job"] == name, events
        assert cli.one("snapshot.details", "show", name)["container"] == title
        assert f"container      {title}" in cli.run("show", name).stdout
        out = cli.folder / f"{name}.out"
        done = cli.one("export.done", "export", name, out.name)
        assert (done["directory"], done["bytes"]) == (out.name, out.stat().st_size)
        assert out.read_bytes()[:4] == source.read_bytes()[:4] or how == "gzip"
        assert making.unpacked(out.read_bytes()) == tar, "the archive differs"
        assert out.stat().st_mode & 0o777 == 0o600
        assert "exists" in cli.run("export", name, out.name, status=2).stderr
    tags = {tag for row in cli.events("ls", "web") for tag in row["tags"]}
    assert tags == {"container:web", "image:localhost/web:1", "runtime:runc"}
    assert len(cli.events("ls", "--tag", "runtime:crun")) == 1
    assert not list(cli.folder.glob(".icecore-*")), "something is left of an export"
    refused = cli.run("restore", "web", status=6).stderr
    assert "it is the checkpoint of a container, web (" in refused and "podman container" in refused


def test_a_second_archive_stores_what_changed(cli: Cli, images: list[Path]) -> None:
    """Of 24 MiB of noise one page differs; a copy of the archive stores next to nothing."""
    cli.run("init")
    archives = [making.podman(images[0]), making.podman(images[1], changed=b"new")]
    assert archives[0] != archives[1]
    done = []
    for number, tar in enumerate([*archives, archives[1]]):
        (cli.folder / "web.tar.zst").write_bytes(making.compressed(tar, "zstd"))
        done.append(cli.one("import.done", "import", "web.tar.zst"))
        assert done[-1]["parent"] == (done[-2]["snapshot"] if number else "")
    stored = [event["stored"] for event in done]
    assert stored[0] > 24 * making.MIB and stored[1] < 4 * making.MIB and stored[2] < 64 << 10, (
        stored
    )
    for event in (events := cli.events("diff", "web~2", "web")):
        check_event(event, documented_events())
    sides = [e["side"] for e in events if e["event"] == "diff.container"]
    assert sides == ["older", "newer"]
    regions = {e["name"] for e in events if e["event"] == "diff.region"}
    assert "rootfs-diff.tar" in regions and "deleted.files" not in regions
    for number, tar in ((1, archives[1]), (2, archives[0])):
        cli.run("export", f"web~{number}", f"out{number}")
        assert making.unpacked((cli.folder / f"out{number}").read_bytes()) == tar


def test_an_archive_may_come_through_a_pipe(cli: Cli, images: list[Path]) -> None:
    cli.run("init")
    tar = making.podman(images[0])
    (cli.folder / "archive").write_bytes(tar)
    with subprocess.Popen(["cat", "archive"], cwd=cli.folder, stdout=subprocess.PIPE) as cat:
        subprocess.run(
            cli.command("import", "/dev/stdin"),
            stdin=cat.stdout,
            env=cli.environment,
            cwd=cli.folder,
            check=True,
            capture_output=True,
            timeout=60,
        )
    cli.run("export", "web", "out")
    assert (cli.folder / "out").read_bytes() == tar


def test_remains_of_an_earlier_checkpoint_are_carried(
    cli: Cli,
    images: list[Path],
    tmp_path: Path,
) -> None:
    """Podman dumps into the directory that it restored from: pagemaps of processes that are gone
    then name page images of the new dump.
    """
    cli.run("init")
    folder = tmp_path / "images"
    folder.mkdir()
    for path in images[0].iterdir():
        os.link(path, folder / path.name)
    pagemap = next(folder.glob("pagemap-*.img"))
    (folder / "pagemap-99999.img").write_bytes(pagemap.read_bytes())
    (folder / "pages-77.img").write_bytes(b"of an earlier one")
    tar = making.podman(folder)
    (cli.folder / "archive").write_bytes(tar)
    cli.run("import", "archive")
    cli.run("export", "web", "out")
    assert (cli.folder / "out").read_bytes() == tar

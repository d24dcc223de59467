"""Makes checkpoint archives of real processes in the layout of Podman, CRI-O and containerd."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zstandard

from icecore.host.criu.program import find_criu

MIB = 1 << 20

#: A process tree: the parent changes one page of its memory at each USR1. It waits for the signal
#: with sigwait: one that a handler takes just before a sleep would be answered only after it.
PROGRAM = """\
import os, signal, sys, time
memory = bytearray(os.urandom(24 << 20))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
if os.fork() == 0:
    while True:
        time.sleep(60)
print("ready", flush=True)
at = 0
while True:
    signal.sigwait([signal.SIGUSR1])
    at += 1
    memory[at * 5 << 20] ^= 255
    print(at, flush=True)
"""


class Tree:
    """A running process tree, of which images are taken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "out"
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        self.wait_for("ready")

    def wait_for(self, line: str) -> None:
        limit = time.monotonic() + 30
        while line not in self.log.read_text().split():
            assert time.monotonic() < limit, "the tree does not answer"
            time.sleep(0.02)

    def change(self, number: int) -> None:
        """Let it change one page of its memory."""
        self.process.send_signal(signal.SIGUSR1)
        self.wait_for(str(number))

    def dump(self, name: str) -> Path:
        """Take images of it, and return the directory."""
        images = self.folder / name
        images.mkdir()
        words = ["dump", "-t", str(self.process.pid), "-D", str(images), "--leave-running"]
        words += ["--network-lock", "skip", "-o", "dump.log"]
        subprocess.run([str(find_criu().path), *words], check=True, capture_output=True, timeout=60)
        return images


@contextmanager
def tree(folder: Path) -> Iterator[Tree]:
    """Run a tree, and end it."""
    running = Tree(folder)
    try:
        yield running
    finally:
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(10)


def plain(
    info: tarfile.TarInfo, *, mode: int = 0o600, when: int = 1_780_000_000
) -> tarfile.TarInfo:
    info.mode, info.mtime = mode, when
    info.uid, info.gid, info.uname, info.gname = 0, 0, "root", "root"
    return info


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a regular file."""
    info = plain(tarfile.TarInfo(name))
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def podman(images: Path, *, name: str = "web", changed: bytes = b"") -> bytes:
    """Return an archive as Podman writes it (4.3: no directory but its own before the images)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(_directory("artifacts/"))
        add(tar, "devshm-checkpoint.tar", _tar({"shm": b"x" * 100}))
        config = {
            "id": "edbbd54ec1f4" * 5 + "1234",
            "name": name,
            "rootfsImageName": "localhost/web:1",
            "runtime": "runc",
            "createdTime": "2026-11-24T14:21:19Z",
        }
        add(tar, "config.dump", json.dumps(config).encode())
        add(tar, "spec.dump", _spec({"io.container.manager": "libpod"}))
        add(tar, "network.status", b"null")
        _add_images(tar, images)
        add(tar, "rootfs-diff.tar", _tar({"etc/changed": changed, "var/big": b"rootfs" * 300_000}))
        add(tar, "deleted.files", b'["/etc/motd"]')
    return out.getvalue()


def crio(images: Path) -> bytes:
    """Return an archive as CRI-O writes it for the kubelet: names begin with ./, headers are pax."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(_directory("./"))
        add(tar, "./bind.mounts", b'[{"source":"/var/lib/x","destination":"/data"}]')
        _add_images(tar, images, "./")
        config = {
            "id": "f" * 64,
            "name": "k8s_counter_counters_default_1",
            "rootfsImageName": "quay.io/example/counter:latest",
            "runtime": "crun",
        }
        add(tar, "./config.dump", json.dumps(config).encode())
        annotations = {
            "io.container.manager": "cri-o",
            "io.kubernetes.pod.name": "counters",
            "io.kubernetes.cri-o.Metadata": json.dumps({"name": "counter", "attempt": 1}),
            "io.kubernetes.cri-o.Created": "2026-11-24T14:21:19Z",
        }
        add(tar, "./spec.dump", _spec(annotations))
        info = plain(tarfile.TarInfo("./io.kubernetes.cri-o.LogPath"))
        info.pax_headers = {"comment": "kept", "SCHILY.xattr.user.x": "y"}
        info.size = 3
        tar.addfile(info, io.BytesIO(b"log"))
    return out.getvalue()


def containerd(images: Path) -> bytes:
    """Return an archive as containerd's CRI plug-in writes it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        _add_images(tar, images)
        add(tar, "config.dump", b'{"rootfsImageName":"docker.io/library/redis:7","runtime":"runc"}')
        add(tar, "container.log", b"line\n" * 5)
        annotations = {
            "io.kubernetes.cri.container-name": "redis",
            "io.kubernetes.cri.sandbox-name": "cache-0",
        }
        add(tar, "spec.dump", _spec(annotations))
        add(tar, "status", b'{"CreatedAt":1,"StartedAt":2}')
    return out.getvalue() + bytes(3 * 512)


def compressed(data: bytes, how: str) -> bytes:
    """Return the archive, compressed."""
    if how == "gzip":
        return gzip.compress(data, 1)
    return zstandard.ZstdCompressor(level=1).compress(data) if how == "zstd" else data


def unpacked(data: bytes) -> bytes:
    """Return the tar in a file that may be compressed."""
    if data[:2] == b"\x1f\x8b":
        return gzip.decompress(data)
    if data[:4] == b"\x28\xb5\x2f\xfd":
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return data


def _spec(annotations: dict[str, str]) -> bytes:
    return json.dumps({"ociVersion": "1.0.2", "annotations": annotations}).encode()


def _directory(name: str) -> tarfile.TarInfo:
    info = plain(tarfile.TarInfo(name), mode=0o700)
    info.type = tarfile.DIRTYPE
    return info


def _add_images(tar: tarfile.TarFile, images: Path, before: str = "") -> None:
    tar.addfile(_directory(f"{before}checkpoint/"))
    for path in sorted(images.iterdir()):
        if path.name.startswith("stats-"):
            add(tar, f"{before}{path.name}", path.read_bytes())
        elif path.name == "dump.log":
            add(tar, f"{before}dump.log", path.read_bytes())
        else:
            add(tar, f"{before}checkpoint/{path.name}", path.read_bytes())


def _tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            add(tar, name, data)
    return out.getvalue()

"""The demo: it passes, and its proofs can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.cli.documents import ROOT
from tests.host.target import eventually

TOOLS = ROOT / "tools"


def load(name: str) -> ModuleType:
    """Load a module of tools/."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_chain_is_what_the_definition_says(tmp_path: Path) -> None:
    job = load("demo_job")
    running = subprocess.Popen(
        [sys.executable, "-P", str(TOOLS / "demo_job.py"), str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "step 100\n"
        (tmp_path / "finish").touch()
        out, _ = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait(10)
    assert running.returncode == 0 and "all memory is right" in out
    lines = (tmp_path / "chain.log").read_text().splitlines()
    assert lines == [
        f"{number} {chain}" for number, chain in enumerate(job.reference(len(lines)), 1)
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="reads and writes another process's memory")
def test_one_changed_byte_is_seen() -> None:
    memory = load("demo_memory")
    program = "import mmap, sys; m = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); m[5000] = 7; print(flush=True); sys.stdin.read()"
    # A shell replaces the init, which is not frozen.
    outer = subprocess.Popen(
        ["/bin/sh", "-c", f"{sys.executable} -I -S -c '{program}'; :"],
        env={**os.environ, "GLIBC_TUNABLES": "glibc.pthread.rseq=0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert outer.stdout is not None
        outer.stdout.readline()
        memory.hold(outer.pid)
        # The shell has a handler for what becomes of its child, which may run between two looks at
        # its memory.
        os.kill(outer.pid, signal.SIGSTOP)
        assert eventually(lambda: memory.state_of(outer.pid) == "T")
        before = memory.read(outer.pid, "/nowhere")
        compared, wrong = memory.differences(before, memory.read(outer.pid, "/nowhere"))
        assert compared > 1 << 20 and wrong == []
        inner = memory.tree(outer.pid)[1]
        region = next(
            one
            for one in before[inner]
            if one.data and one.mode == "rw-p" and one.name == "[stack]"
        )
        with open(f"/proc/{inner}/mem", "r+b", buffering=0) as file:
            file.seek(region.end - 100)
            byte = file.read(1)[0]
            file.seek(region.end - 100)
            file.write(bytes([byte ^ 1]))
        _, wrong = memory.differences(before, memory.read(outer.pid, "/nowhere"))
        assert len(wrong) == 1 and f"process {inner}: 1 pages differ" in wrong[0]
        memory.let_go(outer.pid)
    finally:
        for pid in reversed(memory.tree(outer.pid)):
            os.kill(pid, 9)
        outer.communicate(timeout=10)


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_the_demo(tmp_path: Path) -> None:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ICECORE_") or name == "ICECORE_CRIU_PREFIX"
    }
    done = subprocess.run(
        [sys.executable, "-P", str(TOOLS / "demo")],
        env={**own, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bytes of memory compared with what they were: all equal" in done.stdout
    assert done.stdout.count("it went on at step") == 4
    assert "window ms" in done.stdout and "restore ms" in done.stdout
    assert os.listdir(tmp_path) == []

"""The machine's limits, compared with what the kernel says elsewhere."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from icecore.host.kernel import limits


def test_capabilities_have_names():
    mine = limits.capabilities()
    assert mine == limits.capabilities(os.getpid())
    code = "import sys; sys.path[:0] = sys.argv[1:]; from icecore.host.kernel import limits; print(*limits.capabilities())"
    if "CAP_SETPCAP" in mine and shutil.which("setpriv"):
        drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-sys_ptrace"]
        done = subprocess.run(
            [*drop, sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert "CAP_SYS_PTRACE" in mine and set(done.stdout.split()) == mine - {"CAP_SYS_PTRACE"}


def test_descriptors_for_page_pipes():
    """Measured with CRIU 4.1.1 and 4.2.1 at 4 MiB a pipe: 528 for 1 GiB, 2064 for 4 GiB."""
    per_pipe = limits.pipe_capacity()
    assert 4096 <= per_pipe <= 4 << 20
    if per_pipe == 4 << 20:
        assert 528 <= limits.pipe_need(1 << 30) < 528 + 128
        assert 2064 <= limits.pipe_need(4 << 30) < 2064 + 128
    assert limits.pipe_need(8 << 30) - limits.pipe_need(4 << 30) == 2 * (4 << 30) // per_pipe
    assert limits.pipe_need(0, 10) > limits.pipe_need(0)


def test_descriptor_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert limits.descriptor_limit() >= hard or hard == resource.RLIM_INFINITY
        assert limits.raise_descriptor_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_rest_is_as_the_kernel_says():
    assert limits.kernel_version() >= (4, 0) and os.uname().release.startswith(
        "{}.{}".format(*limits.kernel_version())
    )
    assert limits.io_uring_disabled() in (0, 1, 2)
    assert limits.huge_pages() in ("always", "madvise", "never")
    assert 0 < limits.memory_available() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    usage = shutil.disk_usage("/dev/shm")
    assert abs(limits.free_space("/dev/shm") - usage.free) < 1 << 30
    assert limits.pipe_max_size() == int(Path("/proc/sys/fs/pipe-max-size").read_text())

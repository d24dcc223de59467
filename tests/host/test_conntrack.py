"""CRIU's library asks for tracked connections only where there are some."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from icecore.host.criu.libraries import CRIU_LIBRARY, dump_environment

COUNT = Path("/proc/sys/net/netfilter/nf_conntrack_count")

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(not CRIU_LIBRARY.exists(), reason="needs a C compiler"),
    pytest.mark.skipif(not COUNT.exists(), reason="this kernel tracks no connections"),
]

#: Asks for all connections (IPCTNL_MSG_CT_GET) and all that are expected, says the types of the
#: messages of each answer, then asks for something else.
_ASK = """
import socket, struct
NETFILTER, DUMP = 12, 0x301
def ask(kind, flags):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER) as sock:
        sock.sendmsg([struct.pack("=IHHII4x", 20, kind, flags, 5, 0)])
        data = sock.recvmsg(1 << 14)[0]
        return struct.unpack_from("=IH", data)[1] if data else 0
print(ask(1 << 8 | 1, DUMP), ask(2 << 8 | 1, DUMP), ask(1 << 8 | 1, 1), ask(3 << 8 | 1, DUMP))
"""
_DONE, _ERROR, _NOT_ASKED = 3, 2, 0


def ask(*, said: str = "") -> list[int]:
    """What is answered in a fresh network namespace; ``said``: a file that takes the count's place."""
    bind = f"mount --bind {said} {COUNT} && " if said else ""
    under = ["unshare", "--net", "--mount", "sh", "-c"]
    done = subprocess.run(
        [*under, f'{bind}exec "$0" -P -c "$1"', sys.executable, _ASK],
        env=dump_environment(None),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.returncode, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_nothing_is_asked_where_nothing_is_tracked() -> None:
    all_of_them, expected, one, others = ask()
    assert (all_of_them, expected) == (_NOT_ASKED, _NOT_ASKED)
    assert one == _ERROR, "a request for one connection, which names none"
    assert others in (_DONE, _ERROR), "time-outs: the kernel answers, whether it has them or not"


@pytest.mark.parametrize("count", ["1\n", "10\n", "", "0"])
def test_the_kernel_is_asked_where_something_may_be_tracked(count: str, tmp_path: Path) -> None:
    (tmp_path / "count").write_text(count)
    assert ask(said=str(tmp_path / "count"))[:2] == [_DONE, _DONE]

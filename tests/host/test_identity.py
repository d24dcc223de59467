"""Whether a caller is confined by a security module."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from icecore.errors import UsageError
from icecore.host.jobs.identity import Identity


@pytest.mark.parametrize(
    ("label", "own", "refused"),
    [
        (b"docker-default (enforce)\n", b"unconfined\n", True),
        (b"system_u:system_r:httpd_t:s0\0", b"system_u:system_r:unconfined_service_t:s0\0", True),
        (b"user_u:user_r:unconfined_t:s0\0", b"system_u:system_r:icecore_t:s0\0", False),
        (b"unconfined\n", b"icecore (enforce)\n", False),
        (b"editor (unconfined)\n", b"unconfined\n", False),
        (b"icecore (enforce)\n", b"icecore (enforce)\n", False),
        # Complain mode enforces "deny" rules: aa-complain(8).
        (b"editor (complain)\n", b"unconfined\n", True),
        (b"user_u:user_r:user_t:s0\0", b"system_u:system_r:icecore_t:s0\0", True),
        (b"staff_u:staff_r:staff_t:s0\0", b"system_u:system_r:icecore_t:s0\0", True),
    ],
)
def test_a_confined_caller_is_refused(
    label: bytes, own: bytes, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels are those of kernels with a security module, which a machine need not have."""
    pid = os.getpid()
    labels = {f"/proc/{pid}/attr/current": label, "/proc/self/attr/current": own}
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: labels.get(str(path)) or read(path))
    if refused:
        with pytest.raises(UsageError, match="confined by a security module") as found:
            Identity.of_process(pid)
        cure = (
            "semanage login -a -s unconfined_u" if b":" in label else "without an AppArmor profile"
        )
        assert cure in found.value.cure
    else:
        assert Identity.of_process(pid).user == os.geteuid()

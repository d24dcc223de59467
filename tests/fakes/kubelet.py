"""Behaves as the kubelet does to a container, without images: the command is process 1 of namespaces
of its own with the capabilities that the manifest names; TERM goes to it alone, and after the grace
period KILL, which ends all processes of the namespace.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

MANIFEST = Path(__file__).parents[2] / "configs" / "kubernetes" / "job.yaml"
_SECONDS = 60.0


def container() -> dict[str, object]:
    """Return the container of the Job in the manifest."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    job = next(document for document in documents if document["kind"] == "Job")
    (found,) = job["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def capabilities() -> list[str]:
    """Return the capabilities that the manifest names."""
    context = container()["securityContext"]
    assert isinstance(context, dict) and context["capabilities"]["drop"] == ["ALL"]
    return [str(name).lower() for name in context["capabilities"]["add"]]


def options() -> list[str]:
    """Return the options that the manifest gives to ``icecore run``."""
    command = container()["command"]
    assert isinstance(command, list) and command[:2] == ["icecore", "run"]
    return [str(word) for word in command[2 : command.index("--")]]


@dataclass(frozen=True)
class Pod:
    """A running pod of one container.

    Attributes:
        process: The parent of process 1; it ends as that does.
        init: Process 1, as the node sees it.
        out: The container's log.
    """

    process: subprocess.Popen[bytes]
    init: int
    out: Path

    @classmethod
    def start(
        cls, folder: Path, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> Pod:
        """Start a pod with an empty volume for the state and a termination log."""
        state, out = folder / f"{name}.state", folder / f"{name}.log"
        state.mkdir()
        (folder / f"{name}.termination").touch()
        kept = ",".join(["-all", *(f"+{name}" for name in _known(capabilities()))])
        script = (
            "ip link set lo up && mount -t tmpfs shm /dev/shm &&"
            f" mount --bind {shlex.quote(str(folder / f'{name}.termination'))} /dev/full &&"
            f" exec setpriv --bounding-set={kept} --inh-caps={kept} -- {shlex.join(command)}"
        )
        with open(out, "wb") as log:
            process = subprocess.Popen(
                [
                    *("unshare", "--pid", "--fork", "--mount-proc", "--mount", "--ipc", "--uts"),
                    *("--net", "--cgroup", "--kill-child", "--", "/bin/sh", "-c", script),
                ],
                env={**environment, "ICECORE_STATE": str(state)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return cls(process, _child(process), out)

    def terminate(self, grace: float) -> int:
        """Delete the pod; return the exit status of its container, 137 if it was killed."""
        os.kill(self.init, signal.SIGTERM)
        try:
            return self.wait(grace)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End the pod as the loss of its node does.

        unshare ends with 1 if its child was killed (it cannot reset the handler of KILL), so the
        status is that of the container, not of the process.
        """
        os.kill(self.init, signal.SIGKILL)
        self.wait()
        return 128 + signal.SIGKILL

    def wait(self, seconds: float = _SECONDS) -> int:
        """Return the exit status of the container."""
        status = self.process.wait(seconds)
        return 128 - status if status < 0 else status

    @property
    def lines(self) -> list[str]:
        """What the container wrote."""
        return self.out.read_text(errors="replace").splitlines()

    @property
    def message(self) -> str:
        """The termination message."""
        return self.out.with_suffix(".termination").read_text()


def _known(names: Sequence[str]) -> list[str]:
    """Return the capabilities that this machine can give."""
    bounding = int(
        next(
            line.split()[1]
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("CapBnd")
        ),
        16,
    )
    return [name for name in names if bounding >> _NUMBERS[name] & 1]


#: linux/capability.h
_NUMBERS = {
    "chown": 0,
    "dac_override": 1,
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "net_admin": 12,
    "ipc_lock": 14,
    "sys_chroot": 18,
    "sys_ptrace": 19,
    "sys_admin": 21,
    "sys_nice": 23,
    "sys_resource": 24,
    "sys_time": 25,
    "checkpoint_restore": 40,
}


def _child(process: subprocess.Popen[bytes]) -> int:
    """Return the only child of a process, which is about to be forked."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    limit = time.monotonic() + _SECONDS
    while True:
        children = path.read_text().split()
        if children:
            return int(children[0])
        assert process.poll() is None and time.monotonic() < limit, "the container does not start"
        time.sleep(0.01)

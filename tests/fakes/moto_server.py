"""moto's S3 server on a free port of the loopback, in a process of its own.

The process dies with the one that started it, and a start that takes too long fails.
"""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
from botocore.config import Config

#: moto checks no credentials.
KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
REGION = "us-east-1"
_START_SECONDS = 60.0
_END_SECONDS = 20.0
#: Seconds between moto's look whether a name below ``race/`` is taken and its write.
_RACE_SECONDS = 0.25
# prctl(2), PR_SET_PDEATHSIG: the kernel kills the server when the thread that started it ends. The
# pause makes visible in every run that moto holds no lock from the look to the write; with a lock
# it would change no outcome.
_SERVER = f"""
import ctypes, time
ctypes.CDLL(None).prctl(1, 9)
from moto.s3.models import S3Backend
from moto.server import main
put = S3Backend.put_object
def late(self, bucket, key, *args, **options):
    if "/race/" in key:
        time.sleep({_RACE_SECONDS})
    return put(self, bucket, key, *args, **options)
S3Backend.put_object = late
# moto lists what other threads change meanwhile, and fails: elsewhere, one request at a time.
import threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Application
lock, call = threading.Lock(), Application.__call__
def one_by_one(self, environ, start):
    if "/race/" in environ["PATH_INFO"]:
        return call(self, environ, start)
    with lock:
        return list(call(self, environ, start))
Application.__call__ = one_by_one
main(["-H", "127.0.0.1", "-p", "0"])
"""


@contextmanager
def running(folder: Path, bucket: str) -> Iterator[str]:
    """Run a server with one empty bucket.

    Args:
        folder: Where the server's log is written.
        bucket: Name of the bucket.

    Returns:
        The endpoint, a URL.

    Raises:
        RuntimeError: The server does not start; the message has the end of its log.
    """
    path = folder / "moto.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    try:
        endpoint = _endpoint(process, path)
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            region_name=REGION,
            config=Config(connect_timeout=5, read_timeout=30),
        )
        try:
            client.create_bucket(Bucket=bucket)
        finally:
            client.close()
        yield endpoint
    finally:
        process.kill()
        process.wait(timeout=_END_SECONDS)


def _endpoint(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server answers; it chooses a port and names it in its log."""
    limit = time.monotonic() + _START_SECONDS
    while time.monotonic() < limit and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))
        if found and _answers(int(found[1])):
            return found[0]
        time.sleep(0.05)
    raise RuntimeError(f"moto does not start:\n{log.read_text(errors='replace')[-2000:]}")


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/moto-api/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # not yet
    finally:
        connection.close()

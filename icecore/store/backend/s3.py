"""A back end in a bucket of S3-compatible object storage: an object is one conditional PUT
(If-None-Match: *). boto3 finds endpoint and credentials, obstore moves the bytes.

An object is always one PUT, never a multipart upload, because not every store decides races of
conditional completions (docs/how-to/object-storage.md).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import boto3
import botocore.exceptions
import msgspec
from botocore.config import Config
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from icecore.errors import (
    Damaged,
    NotFound,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    UsageError,
)
from icecore.store.backend.base import (
    FOREIGN_AT_MOST,
    MAX_OFFSET,
    Backend,
    Buffer,
    Foreign,
    ObjectInfo,
    check_name,
    check_prefix,
    is_name,
    length_of,
)
from icecore.store.backend.s3_errors import is_conflict, is_past_end, translate

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config, S3Credential

T = TypeVar("T")

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_PREFIX_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_MAX_PREFIX = 400
_DEFAULT_REGION = "us-east-1"
#: botocore renews credentials 10 to 15 minutes before they expire, so this is often enough to ask.
_CREDENTIAL_SECONDS = 300
#: Bytes of a reply that are handed over at a time: memory of this size is recycled, whereas whole
#: replies would touch new memory.
_PIECE_BYTES = 1 << 20
_LISTED_AT_ONCE = 1000
_DELETED_AT_ONCE = 1000
#: A request may take this many seconds plus the time that its bytes take at this rate.
_SLOWEST_BYTES_PER_SECOND = 1 << 20
#: obstore's message for a listing with a key that it cannot parse (empty or dotted parts, control
#: characters).
_UNNAMEABLE = "Encountered object with invalid path"
_LAST_THREADS_SECONDS, _MOST_THREADS_SECONDS = 0.05, 1.0


class S3Place(msgspec.Struct, frozen=True):
    """A place in a bucket, and how to reach it. boto3 supplies what is empty, from the environment,
    ~/.aws or the machine's role.

    Attributes:
        bucket: The bucket; it must exist.
        prefix: Prefix of all keys, without slashes at its ends; may be empty.
        endpoint: URL of the service; empty: AWS, or the endpoint in boto3's configuration.
        region: The bucket's region.
        profile: Section of ~/.aws/config and ~/.aws/credentials. Its region and endpoint take
            precedence over the environment.
        addressing: Whether the bucket's name goes into the URL's path or host; ``auto``: into the
            host for AWS, otherwise into the path.
        patience: Seconds without an answer after which a request fails.
    """

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    patience: float = 60.0

    def __post_init__(self) -> None:
        if not _BUCKET.match(self.bucket):
            raise UsageError(
                f"{self.bucket!r} is not a bucket name", cure="write s3://BUCKET/PREFIX"
            )
        parts = self.prefix.split("/") if self.prefix else []
        if len(self.prefix) > _MAX_PREFIX or not all(_PREFIX_PART.match(part) for part in parts):
            raise UsageError(
                f"{self.prefix!r} is not a valid prefix",
                cure="use letters, digits, '.', '_' and '-' between single slashes, each part beginning with a letter or digit",
            )

    @property
    def location(self) -> str:
        """``s3://bucket/prefix``, with ``profile@`` before the bucket if there is a profile."""
        bucket = f"{self.profile}@{self.bucket}" if self.profile else self.bucket
        return f"s3://{bucket}/{self.prefix}" if self.prefix else f"s3://{bucket}"


class _Credentials:
    """Gives obstore the credentials of boto3's chain, renewed in time."""

    def __init__(self, found: Any) -> None:
        self._found = found
        self.config: S3Config = {}

    def __call__(self) -> S3Credential:
        now = self._found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_CREDENTIAL_SECONDS),
        }


def _connect(place: S3Place) -> tuple[S3Store, str]:
    """Return the store, and one name of the place for all profiles, regions and addressing styles
    that lead to it.
    """
    try:
        session = boto3.Session(profile_name=place.profile or None)
        # A named profile takes precedence over the environment: otherwise, one of two regions could
        # not be reached.
        said = session._session.get_scoped_config() if place.profile else {}
        client = session.client(
            "s3",
            endpoint_url=place.endpoint or _endpoint_of(session, said),
            region_name=place.region
            or said.get("region")
            or session.region_name
            or _DEFAULT_REGION,
            config=Config(
                s3={} if place.addressing == "auto" else {"addressing_style": place.addressing}
            ),
        )
        credentials = session.get_credentials()
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise UsageError(
            f"{place.location} cannot be reached: {error}",
            cure="correct [s3] or the AWS configuration that it uses",
        ) from error
    if credentials is None:
        raise StoreDenied(
            f"there are no credentials for {place.location}",
            cure="set [s3] profile, AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run on a machine that has a role",
        )
    endpoint, region = client.meta.endpoint_url, client.meta.region_name
    style = (client.meta.config.s3 or {}).get("addressing_style", "auto")
    client.close()
    amazon = re.search(
        r"\.amazonaws\.com(\.cn)?$",
        endpoint.partition("://")[2].partition("/")[0].partition(":")[0],
    )
    # A bucket's name is unique in all of AWS, regardless of region; in other services only at one
    # endpoint.
    service = f"aws{amazon[1] or ''}" if amazon else endpoint.rstrip("/").lower()
    known_as = f"s3 {service} {place.bucket}/{place.prefix}"
    in_host = style == "virtual" or (
        style == "auto" and amazon is not None and "." not in place.bucket
    )
    if in_host:
        scheme, _, host = endpoint.partition("://")
        endpoint = f"{scheme}://{place.bucket}.{host}"
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=min(10.0, place.patience)),
        "timeout": timedelta(hours=6),  # ``_within`` bounds a request by its bytes
        "user_agent": "icecore",
    }
    bundle = session._session.get_config_variable("ca_bundle") or os.environ.get(
        "REQUESTS_CA_BUNDLE"
    )
    if bundle and endpoint.startswith("https://"):
        try:
            with open(bundle, "rb") as file:
                options["root_certificate"] = file.read(1 << 22)
        except OSError as error:
            raise UsageError(
                f"the certificates in {bundle} cannot be read: {error.strerror}",
                cure="correct AWS_CA_BUNDLE",
            ) from error
    store = S3Store(
        place.bucket,
        prefix=place.prefix or None,
        region=region,
        # Under this name it takes precedence over what obstore finds in the environment.
        aws_endpoint_url_s3=endpoint,
        virtual_hosted_style_request=in_host,
        # Every object is verified when it is read, and TLS protects the transfer; hashing the
        # payload once more costs as much as sending it.
        unsigned_payload=True,
        disable_bulk_delete=True,
        client_options=options,
        retry_config={"max_retries": 0},
        credential_provider=_Credentials(credentials),
    )
    return store, known_as


def _endpoint_of(session: boto3.Session, profile: dict[str, Any]) -> str | None:
    """Return the endpoint that a profile configures: in its services section, or in its own lines."""
    services = session._session.full_config.get("services", {}).get(profile.get("services", ""), {})
    endpoint: str | None = services.get("s3", {}).get("endpoint_url") or profile.get("endpoint_url")
    return endpoint


class S3Backend(Backend):
    """Objects in a bucket. For one event loop at a time. Each request is tried once (wrap it in
    `icecore.store.backend.retry`).

    Raises:
        UsageError: The configuration is wrong.
        StoreDenied: There are no credentials.
    """

    #: AWS recommends 8 to 16 MiB; with the smaller size, decoding begins earlier and less new
    #: memory is touched.
    read_size = 8 << 20

    def __init__(self, place: S3Place) -> None:
        self.place = place
        self.where = place.location
        self._store, known_as = _connect(place)
        self.known_as = (known_as,)
        self._foreign: set[Foreign] = set()
        _let_threads_end()

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        check_name(name)
        body = [view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes]
        doing = f"create object {name} in"
        try:
            with self._failing(doing, name):
                whole = body[0] if len(body) == 1 else body or b""
                await self._within(
                    length_of(body),
                    doing,
                    self._store.put_async(name, whole, mode="create", use_multipart=False),
                )
        except ObjectMissing as error:  # a 404 reply to a PUT that does not mention the bucket
            raise NotFound(
                f"there is no bucket for {self.where}",
                cure="make the bucket first, or correct the location",
            ) from error

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        check_name(name)
        doing = f"read object {name} in"
        with self._failing(doing, name):
            reply = await self._within(0, doing, self._store.get_async(name))
            size = reply.meta["size"]
            if size > limit:
                raise Damaged(
                    "object", name, f"it has {size} bytes, more than the {limit} that it can have"
                )
            data = (await self._within(size, doing, reply.bytes_async())).to_bytes()
        if len(data) != size:
            raise StoreError(f"cannot {doing} {self.where}: {len(data)} of {size} bytes arrived")
        return data

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        check_name(name)
        view = out.cast("B")
        if not view.nbytes:
            return
        if not 0 <= offset <= MAX_OFFSET:
            raise Damaged("object", name, f"it has no offset {offset}")
        doing = f"read object {name} in"
        at = 0
        with self._failing(doing, name, end=offset + view.nbytes):
            reply = await self._within(
                0,
                doing,
                self._store.get_async(name, options={"range": (offset, offset + view.nbytes)}),
            )
            size = reply.meta["size"]
            if size < offset + view.nbytes:
                raise _short(name, offset + view.nbytes - max(size, offset), offset + view.nbytes)
            pieces = reply.stream(min_chunk_size=_PIECE_BYTES)
            while at < view.nbytes:
                piece = await self._within(_PIECE_BYTES, doing, anext(pieces, None))
                if piece is None:
                    break
                data = memoryview(piece)
                view[at : at + data.nbytes] = data
                at += data.nbytes
        if at != view.nbytes:
            raise StoreError(f"cannot {doing} {self.where}: {at} of {view.nbytes} bytes arrived")

    async def size(self, name: str) -> int:
        check_name(name)
        doing = f"look at object {name} in"
        with self._failing(doing, name):
            return (await self._within(0, doing, self._store.head_async(name)))["size"]

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        order = _Order(prefix)
        doing = f"list {prefix or 'objects'} in"
        with self._failing(doing):
            pages = self._store.list(prefix or None, chunk_size=_LISTED_AT_ONCE)
        while True:
            with self._failing(doing):
                page = await self._within(0, doing, anext(pages, None))
            if page is None:
                break
            for meta in page:
                if not is_name(meta["path"]) or not meta["path"].startswith(prefix):
                    if len(self._foreign) < FOREIGN_AT_MOST:
                        self._foreign.add(Foreign(meta["path"], "a key that is not an object name"))
                    continue
                for info in order.add(ObjectInfo(meta["path"], meta["size"])):
                    yield info
        for info in order.rest():
            yield info

    async def foreign(self) -> Sequence[Foreign]:
        return sorted(self._foreign)

    async def delete(self, name: str) -> None:
        check_name(name)
        doing = f"delete object {name} in"
        try:
            with self._failing(doing, name):
                await self._within(0, doing, self._store.delete_async(name))
        except ObjectMissing:
            return

    async def delete_many(self, names: Sequence[str]) -> None:
        # One DeleteObjects request for many; it has no order, and absent objects count as deleted.
        for first in range(0, len(names), _DELETED_AT_ONCE):
            some = [check_name(name) for name in names[first : first + _DELETED_AT_ONCE]]
            doing = f"delete {len(some)} objects in"
            try:
                with self._failing(doing):
                    await self._within(0, doing, self._store.delete_async(some))
            except StoreError:
                # Not every S3 service has that request. If the failure had another cause, the first
                # of these fails as well.
                for name in some:
                    await self.delete(name)

    async def _within(self, size: int, doing: str, reply: Awaitable[T]) -> T:
        """Return the reply if it arrives within the time allowed for a request of ``size`` bytes."""
        seconds = self.place.patience + size / _SLOWEST_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(seconds):
                return await reply
        except TimeoutError as error:
            raise StoreError(
                f"cannot {doing} {self.where}: no answer for {seconds:.0f} s",
                cure="check that the endpoint can be reached from here",
            ) from error

    @contextmanager
    def _failing(self, doing: str, name: str = "", *, end: int = 0) -> Iterator[None]:
        """Turn the client's errors into icecore's; ``end`` is the end of the requested range."""
        try:
            yield
        except AlreadyExistsError as error:
            if is_conflict(str(error)):
                raise StoreError(
                    f"cannot {doing} {self.where}: another request for it is in flight"
                ) from error
            raise ObjectExists(f"object {name} exists in {self.where}") from error
        except (BaseError, FileNotFoundError, PermissionError) as error:
            if _UNNAMEABLE in str(error):
                raise StoreError(
                    f"cannot {doing} {self.where}: a key there is not an object name: {str(error)!a}",
                    cure="delete that key with the provider's own tool: it is not icecore's",
                ) from error
            if end and is_past_end(str(error)):
                raise Damaged("object", name, f"it ends before offset {end}") from error
            raise translate(str(error), doing, self.where, name) from error
        except botocore.exceptions.BotoCoreError as error:
            raise StoreDenied(
                f"cannot {doing} {self.where}: {error}", cure="renew the credentials"
            ) from error


class _Order:
    """Puts a listing into the order of names. Stores list by bytes, or (SeaweedFS) folder by
    folder, where ``a/b`` comes before ``a-b``.

    What is below one part of a name is held back until nothing that sorts before it can follow.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._group = ""
        self._held: list[ObjectInfo] = []
        self._last = ""

    def add(self, info: ObjectInfo) -> list[ObjectInfo]:
        """Take one row; return the rows that are certainly next."""
        part, slash, _ = info.name[len(self._prefix) :].partition("/")
        if self._held and (
            part == self._group or part.startswith((f"{self._group}-", f"{self._group}."))
        ):
            self._held.append(info)
            return []
        ready = self.rest()
        self._held, self._group = [info], part
        return ready if slash else ready + self.rest()

    def rest(self) -> list[ObjectInfo]:
        """Return the rows that were held back.

        Raises:
            StoreError: The store lists in some other order.
        """
        ready, self._held = sorted(self._held), []
        if ready:
            if ready[0].name <= self._last:
                raise StoreError(
                    f"the listing of {self._prefix or 'the place'} is not in order: {ready[0].name} after {self._last}",
                    cure="use a store that lists in the order of names (general purpose buckets of S3 do)",
                )
            self._last = ready[-1].name
        return ready


def _short(name: str, missing: int, end: int) -> Damaged:
    return Damaged("object", name, f"it ends {missing} bytes before offset {end}")


@cache
def _let_threads_end() -> None:
    """Give obstore's threads time to leave Python before it ends.

    They deliver a result by waking the event loop and then need the interpreter once more. If it
    has begun to shut down meanwhile, Python before 3.14 ends such threads in a way that aborts the
    process (observed once in 20 to 60 short-lived processes).
    """
    atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    """Wait until no thread is delivering, as far as the kernel tells: on a busy machine, a thread
    may have to wait for its turn.
    """
    time.sleep(_LAST_THREADS_SECONDS)
    end = time.monotonic() + _MOST_THREADS_SECONDS
    own = threading.get_native_id()
    while time.monotonic() < end and any(
        _runs(int(thread)) for thread in os.listdir("/proc/self/task") if int(thread) != own
    ):
        time.sleep(0.01)


def _runs(thread: int) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it has ended
        return False

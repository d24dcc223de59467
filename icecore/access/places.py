"""Locations: the storage of repositories, and the state directory of this node.

There is no default repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from icecore import private
from icecore.config import Config
from icecore.config.loading import load
from icecore.errors import NotFound, StoreError, UsageError
from icecore.events import Sink, discard
from icecore.private import make_parents
from icecore.text import is_utf8

if TYPE_CHECKING:
    from icecore.store.backend.base import Backend

_CURE = "name one with --repository PLACE (-r), ICECORE_REPOSITORY, or repository = \"PLACE\" in icecore.toml; 'icecore init' makes one"


def backend_at(
    location: str, *, create: bool = False, config: Config | None = None, emit: Sink = discard
) -> Backend:
    """Return the storage at a location: a directory, ``file://`` and an absolute path,
    ``s3://BUCKET/PREFIX``, or ``s3://PROFILE@BUCKET/PREFIX``.

    Args:
        create: Create a missing directory. Buckets are never created.
        config: Settings for buckets (sections [s3] and [cache]). None: what `icecore.config.loading.load`
            returns.
        emit: Gets events about retries and, at the close, about the requests that were sent.

    Raises:
        UsageError: The location is empty or of an unknown kind, or settings are wrong.
        NotFound: There is no such directory.
        StoreDenied: There are no credentials.
        StoreError: The directory cannot be created.
    """
    from icecore.store.backend.local import LocalBackend

    if not location:
        raise UsageError("no repository is named", cure=_CURE)
    scheme, separator, rest = location.partition("://")
    if separator and scheme == "s3":
        return _in_bucket(rest, config or load(), emit)
    if separator and scheme != "file":
        raise UsageError(
            f"{location}: repositories are kept in directories and S3 buckets",
            cure="name a directory, or s3://BUCKET/PREFIX",
        )
    if separator and not rest.startswith("/"):
        raise UsageError(f"{location} has no absolute path", cure="write file:///DIR, or just DIR")
    path = Path(rest if separator else location).expanduser()
    if create and not path.exists():
        try:
            make_parents(path.absolute().parent)
            path.mkdir(mode=0o700, exist_ok=True)  # snapshots contain the jobs' secrets
        except OSError as error:
            raise StoreError(
                f"cannot make {path}: {error.strerror}",
                cure="name another directory, or correct its parent",
            ) from error
    return LocalBackend(path, create=create)


def names_of(location: str, config: Config) -> frozenset[str]:
    """Return the names under which this client records a place
    (`icecore.store.backend.base.Backend.known_as`); none if the place is unreachable.

    Raises:
        UsageError: As for `backend_at`.
    """
    try:
        return frozenset(backend_at(location, config=config).known_as)
    except (NotFound, StoreError):
        return frozenset()


def _in_bucket(rest: str, config: Config, emit: Sink) -> Backend:
    try:
        from icecore.store.backend.s3 import S3Backend, S3Place
    except ImportError as error:
        raise UsageError(
            f"a repository in a bucket needs {error.name}", cure="pip install 'icecore[s3]'"
        ) from error
    from icecore.store.backend.limits import Limited
    from icecore.store.backend.metrics import Metered
    from icecore.store.backend.retry import Patience, Retrying

    if not is_utf8(rest):
        raise UsageError(f"s3://{rest}: a name in a bucket must be UTF-8", cure="correct the place")
    whole, _, prefix = rest.partition("/")
    profile, _, bucket = whole.rpartition("@")
    settings = config.s3
    # Endpoint and region in [s3] apply to places that name no profile: another region has another
    # endpoint.
    place = S3Place(
        bucket,
        prefix.rstrip("/"),
        endpoint="" if profile else settings.endpoint,
        region="" if profile else settings.region,
        profile=profile or settings.profile,
        addressing=settings.addressing,
        patience=settings.patience,
    )
    # Metrics count requests that are really sent, and a request that waits for its retry frees its
    # place in the limit.
    sending = Limited(
        Metered(S3Backend(place), emit),
        requests=max(1, settings.requests),
        budget=max(1, settings.budget_bytes),
    )
    backend = Retrying(sending, Patience(attempts=max(1, settings.attempts)), emit)
    if not config.cache.directory:
        return backend
    from icecore.store.backend.blocks import Blocks
    from icecore.store.backend.cached import Cached

    return Cached(backend, Blocks(config.cache.directory, config.cache.bytes), emit=emit)


def state_directory(named: str = "") -> Path:
    """Return the directory that records this node's jobs and the newest generations seen.

    Args:
        named: The configured directory. Empty: `icecore.private.state_directory`.
    """
    return Path(named).expanduser().absolute() if named else private.state_directory()

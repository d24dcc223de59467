"""Where things are kept: repositories by their location, and what this node remembers; rule:
nothing is made here, and there is no repository by default.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from icecore.config import Config, load
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
    """The storage at ``location``: a directory, ``file://`` and its absolute path,
    ``s3://BUCKET/PREFIX``, or ``s3://PROFILE@BUCKET/PREFIX``.

    Args:
        create: Make the directory where it is missing. Buckets are never made.
        config: Its sections [s3] and [cache] say how buckets are reached. None: what
            `icecore.config.load` gives.
        emit: Gets what is said of retries and, when it is closed, of the requests that were sent.

    Raises:
        UsageError: No location, of a kind that this version does not have, or wrong settings.
        NotFound: There is no such directory.
        StoreDenied: There are no credentials.
        StoreError: It cannot be made.
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
            path.mkdir(mode=0o700, exist_ok=True)  # what is kept there holds the jobs' secrets
        except OSError as error:
            raise StoreError(
                f"cannot make {path}: {error.strerror}",
                cure="name another directory, or correct its parent",
            ) from error
    return LocalBackend(path, create=create)


def names_of(location: str, config: Config) -> frozenset[str]:
    """Return the names under which this client remembers a place
    (`icecore.store.backend.base.Backend.known_as`); none if it cannot be reached.

    Raises:
        UsageError: As `backend_at`.
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
    # What [s3] says of the way is meant for places that name no profile: another region has another
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
    # Counted is what is really sent; who waits to try again holds no place among those that send.
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
    """Where the jobs of this node and the newest generations seen are noted down.

    Args:
        named: From the configuration. Empty: as `icecore.host.jobs.registry.state_directory` has
            it.
    """
    from icecore.host.jobs import registry as jobs

    return Path(named).expanduser().absolute() if named else jobs.state_directory()

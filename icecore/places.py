"""Where things are kept: repositories by their location, and what this node remembers; rule: nothing is made here, and there is no repository by default."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from icecore.errors import StoreError, UsageError

if TYPE_CHECKING:
    from icecore.store.backend import Backend

_CURE = "name one with --repository DIR (-r), ICECORE_REPOSITORY, or repository = \"DIR\" in icecore.toml; 'icecore init' makes one"


def backend_at(location: str, *, create: bool = False) -> Backend:
    """The storage at ``location``: a directory, or ``file://`` and its absolute path.

    Args:
        create: Make the directory where it is missing.

    Raises:
        UsageError: No location, or of a kind that this version does not have.
        NotFound: There is no such directory.
        StoreError: It cannot be made.
    """
    from icecore.store.local import LocalBackend

    if not location:
        raise UsageError("no repository is named", cure=_CURE)
    scheme, separator, rest = location.partition("://")
    if separator and scheme != "file":
        raise UsageError(f"{location}: this version keeps repositories in directories only", cure="name a directory")
    if separator and not rest.startswith("/"):
        raise UsageError(f"{location} has no absolute path", cure="write file:///DIR, or just DIR")
    path = Path(rest if separator else location).expanduser()
    if create and not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)  # what is kept there holds the jobs' secrets
        except OSError as error:
            raise StoreError(f"cannot make {path}: {error.strerror}", cure="name another directory, or correct its parent") from error
    return LocalBackend(path, create=create)


def state_directory(named: str = "") -> Path:
    """Where the jobs of this node and the newest generations seen are noted down.

    Args:
        named: From the configuration. Empty: as `icecore.host.jobs.state_directory` has it.
    """
    from icecore.host import jobs

    return Path(named).expanduser().absolute() if named else jobs.state_directory()

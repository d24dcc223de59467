"""The names under which CRIU creates files and directories that have none (`icecore.host.criu.ghosts`).
Each restore uses names of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from icecore.errors import Damaged
from icecore.host.criu import ghosts
from icecore.host.jobs.temporary import covering
from icecore.restorer.files.jobpaths import JobPaths, PathRefused


def name_ghosts(
    images: Path,
    places: Mapping[str, Path],
    *,
    root: str = "",
    is_own: Callable[[str], bool] = lambda path: False,
) -> list[str]:
    """Change CRIU's images so that it uses new names; return the names.

    Args:
        images: CRIU's images.
        places: Private temporary directory → the filled directory that will be bound over it.
        root: Directory to which other paths are relative.
        is_own: Whether another path lies in a file system of the instance itself, which CRIU makes.
    """

    def is_there(folder: str) -> bool:
        if point := covering(tuple(places), folder):
            return (places[point] / os.path.relpath(folder, point)).is_dir()
        return is_own(folder) or os.path.isdir(root + folder)

    def is_taken(path: str) -> bool:
        if point := covering(tuple(places), path):
            return os.path.lexists(places[point] / os.path.relpath(path, point))
        return not is_own(path) and os.path.lexists(root + path)

    return ghosts.make_unique(images, is_there, is_taken)


def remove_ghosts(names: Sequence[str], root: str = "") -> None:
    """Remove those names of `name_ghosts` that a killed CRIU has left."""
    with JobPaths(root) as paths:
        for path in names:
            folder, name = os.path.split(path)
            with suppress(OSError, PathRefused, Damaged):
                place = paths.directory(folder).descriptor
                try:
                    os.unlink(name, dir_fd=place)
                except IsADirectoryError:
                    os.rmdir(name, dir_fd=place)

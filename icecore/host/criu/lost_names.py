"""Open files that lost their name but have others, in CRIU's images (images/remap-file-path.proto).

CRIU makes a link ``link_remap.N`` for each open file description and removes it when it leaves the
tree running. A restore requires the file there. The images do not record inodes: only the processes
show which files are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from icecore.host.criu.images import (
    FILES,
    LINKED,
    REGULAR_FILE,
    REMAP_FPATH,
    Remap,
    load_files,
    load_remaps,
    read_image,
    write_image,
)
from icecore.host.criu.opened_images import OpenedImages

_ORIGINAL, _TARGET = 1, 2
_REGULAR, _ID, _PATH = 3, 1, 6  # images/fdinfo.proto, images/regfile.proto


class LostNames:
    """The links of complete images.

    Args:
        folder: CRIU's images.
        pids: Host pid → image id.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int]) -> None:
        self._folder = folder
        self._left: dict[int, Remap] = {
            remap.original: remap for remap in load_remaps(folder) if remap.kind == LINKED
        }
        self._files = {file.id: file for file in load_files(folder)} if self._left else {}
        self._reached = self._reach(pids) if self._left else {}

    def make_unique(self, suffix: str, stays: Callable[[str], bool]) -> None:
        """Add ``suffix`` to the names under which CRIU will look for files. Call this before `join`,
        once CRIU has removed its links. It does so before it says that memory can be read.

        CRIU numbers the links of each dump from the same start. Two jobs may have files in one
        directory, such as /dev/shm, and restores at the same time would use the same names.

        Args:
            stays: Returns whether a path keeps its name: it is on one of the job's own file systems,
                which CRIU's images contain with the link.
        """
        targets = {remap.target for remap in self._left.values()}
        if not targets:
            return
        path = self._folder / "files.img"
        entries = read_image(path, FILES)
        for entry in entries:
            if entry.integer(1) == REGULAR_FILE:
                file = entry.message(_REGULAR)
                number, name = file.integer(_ID), file.text(_PATH)
                if number in targets and not stays(self._files[number].path):
                    file.set(_PATH, name + suffix)
                    entry.set(_REGULAR, file)
        path.unlink()  # it may be shared with the repository
        write_image(path, entries, FILES)
        self._files = {file.id: file for file in load_files(self._folder)}

    def _reach(self, pids: Mapping[int, int]) -> dict[str, int]:
        """Map the paths under /proc of descriptors and mappings to the numbers of their files."""
        opened, found = OpenedImages(self._folder), {}
        for pid, number in pids.items():
            for descriptor, one in opened.descriptors(number).items():
                found[f"/proc/{pid}/fd/{descriptor}"] = one.file.id
            for start, end, one in opened.mappings(number):
                found[f"/proc/{pid}/map_files/{start:x}-{end:x}"] = one.file.id
        return found

    def join(self, reached: Iterable[str]) -> str:
        """Have CRIU look for a file under a single name, however often it is open, and return that
        name. Empty: CRIU does not look for the file, because its images contain the content.

        Args:
            reached: The paths under /proc through which processes have the file.
        """
        numbers = {self._reached.get(path) for path in reached}
        own = [remap for number, remap in sorted(self._left.items()) if number in numbers]
        if not own:
            return ""
        first = own[0]
        # CRIU makes the link on the mount of the description that it opens.
        mount = self._files[first.original].mount
        same = {one.original for one in own if self._files[one.original].mount == mount}
        if len(same) > 1:
            self._point(same, first.target)
        for number in same:
            del self._left[number]
        return self._files[first.target].path

    def _point(self, originals: set[int], target: int) -> None:
        path = self._folder / "remap-fpath.img"
        entries = read_image(path, REMAP_FPATH)
        for entry in entries:
            if entry.integer(_ORIGINAL) in originals:
                entry.set(_TARGET, target)
        path.unlink()  # it may be shared with the repository
        write_image(path, entries, REMAP_FPATH)

    def left(self) -> list[str]:
        """Return the lost names of the files that were not joined."""
        return [self._files[number].path for number in self._left]

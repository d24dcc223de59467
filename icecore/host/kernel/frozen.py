"""Whether a cgroup is frozen, and its thaw (cgroups(7)): in version 2, or the freezer of version 1.

The guard of a dump imports this module: one process for each dump, so the module imports little.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

#: Control file → what thaws the group.
_CONTROLS = {"cgroup.freeze": "0", "freezer.state": "THAWED"}
#: Extended attribute of a group that a dump freezes (`icecore.host.kernel.freezer.mark`).
MARK = "trusted.icecore.dump"


def control(group: Path) -> Path | None:
    """Return the file through which a cgroup is frozen; None: it has none."""
    return next((group / name for name in _CONTROLS if (group / name).exists()), None)


def is_frozen(group: Path) -> bool:
    """Return whether the cgroup is frozen, or is about to be."""
    file = control(group)
    with suppress(OSError):
        return file is not None and file.read_text().strip() not in ("0", "THAWED")
    return False


def thaw(group: Path) -> None:
    """Let the processes of the cgroup run. It may be gone already."""
    file = control(group)
    if file is not None:
        try:
            file.write_text(_CONTROLS[file.name])
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):  # ENODEV: it is being removed
                raise
        with suppress(OSError):  # it has no mark
            os.removexattr(group, MARK)

"""What the ctime of a file proves about writes after a look at it. Pure."""

#: ns: the clock that file systems read advances in ticks, of up to 10 ms.
_TICK_NS = 100_000_000
#: ns: some file systems record only whole seconds (ext4 with inodes of 128 bytes, ext3, Lustre,
#: many network file systems) or only every other second (vfat).
_COARSE_TICK_NS = 2_100_000_000
_SECOND_NS = 1_000_000_000


def shows_later_writes(ctime_ns: int, looked_ns: int) -> bool:
    """Return whether a write after a look certainly gives the file another ctime.

    It does not if the file changed shortly before the look: both changes may lie in the same tick
    of the clock, or in the same second where the file system records whole seconds.

    Args:
        ctime_ns: The file's ctime, ns since the epoch. A whole second counts as coarse.
        looked_ns: When the look began, ns since the epoch.
    """
    tick = _TICK_NS if ctime_ns % _SECOND_NS else _COARSE_TICK_NS
    return ctime_ns < looked_ns - tick

"""A job that appends to a log and rewrites a file in place, and verifies that both are exactly what
it wrote.

The log may hold neither less nor more than what this process remembers to have written: after a
restore, lines written after the snapshot must be gone, and blocks rewritten after it must be back.

    python logger.py STATE_DIR [--ledger-mib 1] [--rate 200]
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
import time
import zlib

import numpy as np

if not __package__:  # run as a program
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.programs.report import Report, run

BLOCK = 4096
LINES_A_STEP = 5


def line_of(number: int) -> bytes:
    """Line ``number`` of the log, counted from 1: its number, some text, a check sum."""
    text = np.random.Generator(np.random.SFC64([number])).bytes(number % 60).hex()
    body = f"{number} {text}"
    return f"{body} {zlib.crc32(body.encode()):08x}\n".encode()


def block_of(number: int, version: int) -> bytes:
    generator = np.random.Generator(np.random.SFC64([number, version]))
    return struct.pack("<QQ", number, version) + generator.bytes(BLOCK - 16)


class Log:
    """The log and what must be in it: its length, the check sum of the whole, each line once and in
    order.
    """

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self.lines, self.size, self.checksum = 0, 0, 0

    def append(self) -> None:
        self.lines += 1
        line = line_of(self.lines)
        self.checksum = zlib.crc32(line, self.checksum)
        self.size += os.write(self.file, line)

    def wrong(self) -> str:
        """Empty, or what is wrong with the log as it is on disk."""
        found = os.pread(self.file, self.size + (64 << 10), 0)
        if len(found) == self.size and zlib.crc32(found) == self.checksum:
            return ""
        for number, line in enumerate(found.splitlines(keepends=True), 1):
            if number > self.lines:
                return f"the log has {len(found)} bytes, {self.size} were written: it goes on after line {self.lines}"
            if line != line_of(number):
                return f"line {number} of the log is {line[:60]!r}, not {line_of(number)[:60]!r}"
        return f"the log has {len(found)} bytes, {self.size} were written: lines are missing at its end"


class Ledger:
    """A file of blocks that are rewritten in place, in pseudo-random order."""

    def __init__(self, path: str, blocks: int) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self.version = [1] * blocks
        self.step = 0
        for number in range(blocks):
            os.write(self.file, block_of(number, 1))

    def rewrite(self) -> str:
        self.step += 1
        number = zlib.crc32(struct.pack("<Q", self.step)) % len(self.version)
        what = self.wrong(number)
        self.version[number] += 1
        os.pwrite(self.file, block_of(number, self.version[number]), number * BLOCK)
        return what

    def wrong(self, number: int) -> str:
        found = os.pread(self.file, BLOCK, number * BLOCK)
        if found == block_of(number, self.version[number]):
            return ""
        head = struct.unpack_from("<QQ", found) if len(found) >= 16 else ()
        return f"block {number} of the ledger is not its version {self.version[number]}: it begins with {head}"


def main(report: Report, blocks: int, rate: float) -> int:
    log = Log(str(report.state_dir / "job.log"))
    ledger = Ledger(str(report.state_dir / "ledger"), blocks)
    step = 0
    while not report.finish_asked():
        step += 1
        for _ in range(LINES_A_STEP):
            log.append()
        for what in (ledger.rewrite(), log.wrong() if step % 20 == 1 else ""):
            if what:
                report.violation(f"step {step}: {what}")
        if (size := os.fstat(log.file).st_size) != log.size:
            report.violation(f"step {step}: the log has {size} bytes, {log.size} were written")
        report.write(step, lines=log.lines, size=log.size)
        time.sleep(1 / rate)
    for what in (log.wrong(), *(ledger.wrong(number) for number in range(blocks))):
        if what:
            report.violation(f"at the end: {what}")
    return report.end(step, lines=log.lines, size=log.size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state_dir")
    parser.add_argument("--ledger-mib", type=float, default=1)
    parser.add_argument("--rate", type=float, default=200.0, help="steps a second, at most")
    options = parser.parse_args()
    number_of_blocks = max(1, int(options.ledger_mib * (1 << 20)) // BLOCK)
    sys.exit(
        run(
            Report(options.state_dir, "logger"),
            lambda report: main(report, number_of_blocks, options.rate),
        )
    )

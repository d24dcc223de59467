"""Runs the command line: ``python -m icecore``."""

import sys

from icecore.cli import program

if __name__ == "__main__":
    sys.exit(program())

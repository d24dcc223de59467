"""Runs the command line: ``python -m icecore``."""

import sys

from icecore.cli import main

if __name__ == "__main__":
    sys.exit(main())

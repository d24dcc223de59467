"""The command line of `tests.cli`."""

from tests.cli.conftest import cli, needs_criu, zygote

__all__ = ["cli", "needs_criu", "zygote"]

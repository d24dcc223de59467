"""The command line of `tests.cli`, for jobs that are looked after."""

from tests.cli.conftest import cli, needs_criu, zygote

__all__ = ["cli", "needs_criu", "zygote"]

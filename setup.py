"""Builds the job init, a C program (host/init.c); rule: without a compiler the installation goes on, and who misses the program says so."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Freestanding: no libc's start-up code, which would choose instructions by the CPU it starts on; one small mapping.
INIT_FLAGS = [
    *("-O2", "-Wall", "-Wextra"),
    *("-static", "-nostdlib", "-nostartfiles", "-ffreestanding", "-fno-pie", "-no-pie"),
    *("-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-fno-tree-loop-distribute-patterns"),
    *("-Wl,--build-id=sha1", "-Wl,-z,noseparate-code", "-Wl,-z,noexecstack", "-s"),
]


class BuildPrograms(build_ext):
    """Makes executables where setuptools would make extension modules: it knows where they belong in each kind of installation."""

    def get_ext_filename(self, fullname: str) -> str:
        *folders, name = fullname.split(".")
        return str(Path(*folders, name.replace("_", "-")))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [*shlex.split(os.environ.get("CC", "cc")), *INIT_FLAGS, "-o", str(target), *ext.sources]
        self.announce(shlex.join(command), level=2)
        try:
            subprocess.run(command, check=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            raise CompileError(f"{ext.sources[0]} was not built, so 'icecore run' will not work: {error}") from error


setup(
    ext_modules=[Extension("icecore.host.icecore_init", ["host/init.c"], optional=True)],
    cmdclass={"build_ext": BuildPrograms},
)

"""Build the C programs and libraries: the job init, CRIU's libraries, the preload and the keeper.
Without a compiler the installation continues and says what will not work.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Freestanding: a libc's start-up code would choose instructions by the CPU that it starts on. One
# small mapping.
INIT_FLAGS = [
    *("-O2", "-Wall", "-Wextra"),
    *("-static", "-nostdlib", "-nostartfiles", "-ffreestanding", "-fno-pie", "-no-pie"),
    *(
        "-fno-stack-protector",
        "-fno-asynchronous-unwind-tables",
        "-fno-tree-loop-distribute-patterns",
    ),
    *("-Wl,--build-id=sha1", "-Wl,-z,noseparate-code", "-Wl,-z,noexecstack", "-s"),
]


RESIDENT = "icecore/host/resident/"
COMMON_FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra"]
LIBRARY_FLAGS = [*COMMON_FLAGS, "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,defs"]
PRELOAD_FLAGS = [*LIBRARY_FLAGS, "-Wl,-z,now", "-Wl,-soname,libicecore-resident.so"]
# The library defines memcpy: the compiler must not turn its loop into a call of memcpy.
CRIU_FLAGS = [*LIBRARY_FLAGS, "-fno-builtin", "-Wl,-soname,libicecore-criu.so"]
CRIU_SOURCES = [
    "icecore/host/criu/allocate.c",
    "icecore/host/criu/conntrack.c",
    "icecore/host/criu/diag.c",
    "icecore/host/criu/facts.c",
    "icecore/host/criu/freezer.c",
    "icecore/host/criu/limits.c",
    "icecore/host/criu/map_files.c",
    "icecore/host/criu/mappings.c",
    "icecore/host/criu/memcpy.c",
    "icecore/host/criu/names.c",
    "icecore/host/criu/pages.c",
    "icecore/host/criu/proc.c",
    "icecore/host/criu/process_maps.c",
    "icecore/host/criu/release.c",
    "icecore/host/criu/scripts.c",
    "icecore/host/criu/shared.c",
    "icecore/host/criu/traced.c",
]
RESTORE_SOURCES = [
    "icecore/host/criu/detach.c",
    "icecore/host/criu/facts.c",
    "icecore/host/criu/join.c",
    "icecore/host/criu/locks.c",
    "icecore/host/criu/names.c",
    "icecore/host/criu/placed.c",
    "icecore/host/criu/reserve.c",
    "icecore/host/criu/traced.c",
]
PRELOAD_SOURCES = [
    str(path) for path in sorted(Path(RESIDENT).glob("*.c")) if path.name != "keeper.c"
]


class Program(Extension):
    """A program or library that Python does not import.

    Args:
        name: The package that contains it, a slash, and its file name.
        flags: Flags of the compiler.
        without: What does not work if it could not be built.
        libraries: The end of the command.
    """

    def __init__(
        self, name: str, sources: list[str], flags: list[str], without: str, libraries: list[str]
    ) -> None:
        package, _, file_name = name.partition("/")
        headers = [str(path) for path in sorted(Path(sources[0]).parent.glob("*.h"))]
        super().__init__(
            f"{package}.{file_name.replace('.', '_')}", sources, optional=True, depends=headers
        )
        self.file_name = file_name
        self.flags = flags
        self.without = without
        self.last = libraries


class BuildPrograms(build_ext):
    """Build programs in place of extension modules, whose place in each kind of installation
    setuptools knows.
    """

    def get_ext_filename(self, fullname: str) -> str:
        *folders, name = fullname.split(".")
        names = {ext.name.rpartition(".")[2]: ext.file_name for ext in self.extensions}
        return str(Path(*folders, names[name]))

    def build_extension(self, ext: Program) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # A running job may have the old file mapped, and keeps it.
        made = target.with_name(target.name + ".new")
        command = [
            *shlex.split(os.environ.get("CC", "cc")),
            *ext.flags,
            "-o",
            str(made),
            *ext.sources,
            *ext.last,
        ]
        self.announce(shlex.join(command), level=2)
        try:
            subprocess.run(command, check=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            raise CompileError(
                f"{ext.file_name} was not built, so {ext.without}: {error}"
            ) from error
        made.replace(target)


setup(
    ext_modules=[
        Program(
            "icecore.host.jobs/icecore-init",
            ["icecore/host/jobs/init.c"],
            INIT_FLAGS,
            "'icecore run' will not work",
            [],
        ),
        Program(
            "icecore.host.criu/libicecore-criu.so",
            CRIU_SOURCES,
            CRIU_FLAGS,
            "windows are longer, by some 45 ms for each GiB of memory in small pages, and need a descriptor for every 2 MiB",
            [],
        ),
        Program(
            "icecore.host.criu/libicecore-restore.so",
            RESTORE_SOURCES,
            LIBRARY_FLAGS,
            "a restore fails if a process of the job ends another while CRIU detaches them, and POSIX locks of mapped files are lost",
            [],
        ),
        Program(
            "icecore.host.criu/libicecore-devices.so",
            ["icecore/host/criu/devices.c", "icecore/host/criu/device_files.c"],
            LIBRARY_FLAGS,
            "GPU jobs can neither be dumped nor restored",
            [],
        ),
        Program(
            "icecore.host.criu/libicecore-sockets.so",
            ["icecore/host/criu/sockets.c"],
            LIBRARY_FLAGS,
            "jobs that are connected to unix sockets of other processes cannot be dumped",
            [],
        ),
        Program(
            "icecore.host.kernel/libicecore-scan.so",
            [
                "icecore/host/kernel/scan_cells.c",
                "icecore/host/kernel/in_place.c",
                "icecore/host/kernel/proc_files.c",
            ],
            LIBRARY_FLAGS,
            "memory is scanned through the interpreter, which is slower on many cores, and windows of trees with many processes are longer",
            [],
        ),
        Program(
            "icecore.host.resident/libicecore-resident.so",
            PRELOAD_SOURCES,
            PRELOAD_FLAGS,
            "device memory goes through the driver in every window",
            ["-lpthread", "-ldl"],
        ),
        Program(
            "icecore.host.resident/icecore-keeper",
            [f"{RESIDENT}keeper.c"],
            COMMON_FLAGS,
            "device memory goes through the driver in every window",
            [],
        ),
    ],
    cmdclass={"build_ext": BuildPrograms},
)

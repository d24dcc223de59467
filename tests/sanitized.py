"""The preload and the keeper under AddressSanitizer and UndefinedBehaviorSanitizer, for `make
sanitize` (ICECORE_SANITIZE=1): built beside the installed ones, which stay as they are.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import icecore.host.resident

WANTED = bool(os.environ.get("ICECORE_SANITIZE"))
_SOURCES = Path(icecore.host.resident.__file__).parent
_FLAGS = ["gcc", "-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=undefined"]
#: Our dlsym runs before AddressSanitizer has its shadow memory.
_EARLY = {"driver.c", "interpose.c"}


def build(folder: Path) -> None:
    """Build both into a folder, under the names of the installed ones."""
    objects = []
    for source in sorted(_SOURCES.glob("*.c")):
        if source.name == "keeper.c":
            continue
        address = [] if source.name in _EARLY else ["-fsanitize=address"]
        objects.append(str(folder / f"{source.stem}.o"))
        _run(
            *_FLAGS, *address, "-fPIC", "-fvisibility=hidden", "-c", "-o", objects[-1], str(source)
        )
    both = [*_FLAGS, "-fsanitize=address"]
    library = str(folder / "libicecore-resident.so")
    _run(*both, "-shared", "-Wl,-z,defs", "-o", library, *objects, "-lpthread", "-ldl")
    _run(*both, "-o", str(folder / "icecore-keeper"), str(_SOURCES / "keeper.c"))


def runtimes() -> str:
    """Return what must be preloaded before all else."""
    names = ("libasan.so", "libubsan.so")
    return ":".join(_run("gcc", f"-print-file-name={name}") for name in names)


def options(folder: Path) -> dict[str, str]:
    """Return the environment in which reports are written to files of a folder. Leaks are not
    looked for: the processes are Python.
    """
    common = f"log_path={folder}/report:print_stacktrace=1"
    return {
        "ASAN_OPTIONS": f"{common}:detect_leaks=0:handle_segv=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": common,
    }


def reports(folder: Path) -> list[str]:
    """Return what the sanitizers have reported."""
    return [path.read_text(errors="replace") for path in sorted(folder.glob("report*"))]


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()

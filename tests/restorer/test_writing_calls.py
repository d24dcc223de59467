"""Nothing in the restorer but its own module for it names a job's path to a system call that
writes; read from the sources.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RESTORER = Path(__file__).parents[2] / "icecore" / "restorer"

#: Functions of `os` that change what a path names, or open it.
OS_CALLS = {
    "open",
    "chown",
    "lchown",
    "chmod",
    "lchmod",
    "utime",
    "truncate",
    "rename",
    "renames",
    "replace",
    "link",
    "symlink",
    "unlink",
    "remove",
    "mkdir",
    "makedirs",
    "rmdir",
    "removedirs",
    "mkfifo",
    "mknod",
    "setxattr",
    "removexattr",
    "chroot",
    "posix_spawn",
    "system",
}
#: Methods of `pathlib.Path` that do.
PATH_CALLS = {
    "write_text",
    "write_bytes",
    "touch",
    "mkdir",
    "unlink",
    "rmdir",
    "symlink_to",
    "hardlink_to",
    "chmod",
    "lchmod",
}
#: Methods that strings and others have too: `Path`'s take one argument.
PATH_CALLS_OF_ONE = {"rename", "replace"}
WRITES = set("wax+")

#: Module -> the calls in it, and why no job's path is given to them.
ALLOWED: dict[str, tuple[set[str], str]] = {
    "files/jobfiles.py": (
        {"os.link", "os.unlink", "os.utime"},
        "the module for it: names below checked directory descriptors, and descriptors",
    ),
    "files/job_directories.py": (
        {
            "os.open",
            "os.chown",
            "os.mkdir",
            "os.rmdir",
            "os.utime",
        },
        "the module for it: names below checked directory descriptors, and descriptors",
    ),
    "files/job_inodes.py": (
        {
            "os.open",
            "os.chmod",
            "os.chown",
            "os.mkfifo",
            "os.removexattr",
            "os.setxattr",
            "os.symlink",
            "os.unlink",
            "os.utime",
        },
        "the module for it: names below checked directory descriptors, and descriptors",
    ),
    "files/ghost_names.py": (
        {"os.rmdir", "os.unlink"},
        "names that this restore made up, below checked directory descriptors",
    ),
    "files/jobpaths.py": ({"os.open"}, "opens the root alone, with O_PATH"),
    "files/file_changes.py": (
        {"os.open", "os.utime", "Path.rename", "Path.unlink"},
        "descriptors from jobfiles.py; saved contents in the state directory, where root alone writes",
    ),
    "files/data.py": (
        {"filesystem.open_confined"},
        "opens a checked directory itself, to list it",
    ),
    "files/data_export.py": (
        {"Path.mkdir"},
        "the directory that the user named; everything in it goes through jobfiles.py",
    ),
    "files/image_paths.py": (
        {"os.open", "filesystem.open_confined"},
        "looks where paths lead, with O_PATH, below directories that only root can enter",
    ),
    "files/allowed.py": (
        {"filesystem.acting_as"},
        "asks as the job's user what it may open; opens nothing",
    ),
    "files/socket_names.py": (
        {"filesystem.acting_as"},
        "asks as the job's user whether it may make a name; makes none",
    ),
    "fill/charging.py": (
        {"open"},
        "a memfd of its own",
    ),
    "files/file_journal.py": (
        {
            "os.open",
            "open",
            "Path.mkdir",
            "Path.replace",
            "Path.rename",
            "Path.unlink",
            "Path.write_bytes",
            "shutil.rmtree",
        },
        "the state directory, which is checked to be root's alone",
    ),
    "files/plan.py": (
        {"os.open"},
        "reads what is to be compared, below a checked directory descriptor",
    ),
    "files/filewriter.py": (
        {"os.open"},
        "image files in icecore's work directory, and logs in the instance's directory; job's files come as descriptors",
    ),
    "files/images.py": ({"os.unlink"}, "pagemap images in icecore's work directory"),
    "files/beside.py": (
        {"os.open"},
        "asks who has a file open, with O_PATH below a checked directory descriptor",
    ),
    "files/copies.py": (
        {"os.makedirs", "os.rmdir"},
        "the directory that the user named, which root alone can change, and all directories on the way to it",
    ),
    "files/archive.py": (
        {
            "open",
            "os.link",
            "os.open",
            "os.rename",
            "shutil.copyfileobj",
            "tempfile.TemporaryDirectory",
        },
        "the file that the user named, and a new directory beside it",
    ),
    "phases/resources.py": ({"Path.chmod"}, "the directory of the instance, which is icecore's"),
    "files/peers.py": (
        {"filesystem.acting_as", "filesystem.open_confined", "os.open"},
        "opens with O_PATH, with the rights of the job's user, and asks whether a socket answers",
    ),
    "files/exporter.py": (
        {"Path.mkdir", "Path.unlink", "shutil.rmtree"},
        "the directory that the user named; open files in it go through jobfiles.py",
    ),
    "fill/shared.py": (
        {"os.open"},
        "shared memory of the restored processes: a regular file of the kernel's own tmpfs, seen with O_PATH first",
    ),
    "phases/planning.py": (
        {"Path.mkdir", "shutil.rmtree"},
        "icecore's work directory, made by icecore.host.workdir",
    ),
    "phases/releasing.py": ({"shutil.rmtree"}, "icecore's work directory"),
    "tree.py": (
        {"os.open", "os.mkfifo", "Path.write_text", "Path.chmod"},
        "the hold script and its FIFO in icecore's work directory",
    ),
    "guard/client.py": ({"open"}, "the guard's output in icecore's work directory"),
    "guard/guard_process.py": (
        {"os.open", "os.unlink", "os.posix_spawn", "shutil.rmtree"},
        "CRIU's output and socket in the guard's work directory",
    ),
    "place/locks.py": ({"os.open"}, "lock files in icecore's work directory"),
    "place/file_table.py": ({"open"}, "memory (memfd), by descriptor"),
}


def writing_calls(source: str) -> set[str]:
    """The calls of a module that could write to a path: ``os.X``, ``Path.X``, ``shutil.X``,
    ``tempfile.X``, ``open``, ``filesystem.X``.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in (
            "os",
            "shutil",
            "tempfile",
            "ctypes",
        ):
            found |= {f"from {node.module} import {alias.name}" for alias in node.names}
        kernel, _, module = (getattr(node, "module", "") or "").rpartition(".")
        if kernel == "icecore.host.kernel" and module in ("filesystem", "removal"):
            found |= {f"{module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {
                f"import {alias.name} as {alias.asname}"
                for alias in node.names
                if alias.name in ("os", "shutil", "tempfile") and alias.asname
            }
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id == "open" and _writes(node):
            found.add("open")
        if not isinstance(function, ast.Attribute):
            continue
        base = function.value.id if isinstance(function.value, ast.Name) else ""
        name = function.attr
        if base == "os":
            if name in OS_CALLS:
                found.add(f"os.{name}")
        elif base in ("shutil", "tempfile"):
            found.add(f"{base}.{name}")
        elif base in (
            "msgspec",
            "files",
            "self._files",
            "job_inodes",
        ):  # not paths: fields of structs, and jobfiles.py with its parts
            continue
        elif name in PATH_CALLS or (
            name in PATH_CALLS_OF_ONE and len(node.args) == 1 and not node.keywords
        ):
            found.add(f"Path.{name}")
        elif name == "open" and _is_mode(node.args[:1]) and _writes(node, 0):
            found.add("Path.open")
    # A function that is handed on is called elsewhere.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = node.value.id, node.attr
            if (module == "os" and name in OS_CALLS) or (module == "shutil" and name.islower()):
                found.add(f"{module}.{name}")
    return found


def _writes(call: ast.Call, position: int = 1) -> bool:
    """Whether an ``open`` may write: its mode says so, or cannot be read from the source."""
    given = [word.value for word in call.keywords if word.arg == "mode"] + call.args[
        position : position + 1
    ]
    return any(
        not isinstance(mode, ast.Constant)
        or (isinstance(mode.value, str) and bool(WRITES & set(mode.value)))
        for mode in given
    )


def _is_mode(arguments: list[ast.expr]) -> bool:
    """Whether the first argument of a method ``open`` is a mode: others than `Path` have such a
    method.
    """
    return (
        bool(arguments)
        and isinstance(arguments[0], ast.Constant)
        and isinstance(arguments[0].value, str)
        and len(arguments[0].value) <= 3
    )


#: `JobFiles`, and the steps that it runs in its thread.
JOB_FILES = {
    "files/jobfiles.py",
    "files/job_directories.py",
    "files/job_inodes.py",
    "files/rights.py",
}
MODULES = sorted(str(path.relative_to(RESTORER)) for path in RESTORER.rglob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_only_the_module_for_it_writes_to_a_jobs_files(name: str) -> None:
    allowed, reason = ALLOWED.get(name, (set(), ""))
    primitives = {
        "filesystem.rename",
        "filesystem.acting_as",
        "filesystem.open_confined",
        "filesystem.RENAME_EXCHANGE",
        "filesystem.RENAME_NOREPLACE",
        "removal.remove_tree",
    }
    if name in {*JOB_FILES, "files/jobpaths.py"}:
        allowed = allowed | primitives
    found = writing_calls((RESTORER / name).read_text())
    assert found <= allowed, (
        f"{name} writes by path; use JobFiles, or say here why no job's path is meant: {sorted(found - allowed)}"
    )
    stale = (allowed - primitives) - found
    assert not stale, f"{name} does not call {sorted(stale)} any more ({reason})"


@pytest.mark.parametrize("name", sorted({*MODULES} - JOB_FILES))
def test_only_job_files_runs_its_steps(name: str) -> None:
    """Others may name the types: who owns a file, which one it is, and what was made."""
    types = {"Owner", "Inode", "inode_of", "MadeDirectory"}
    imported = set()
    for node in ast.walk(ast.parse((RESTORER / name).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.split(".")[-1] in ("job_directories", "job_inodes", "rights"):
                imported |= {alias.name for alias in node.names}
            imported |= {alias.name for alias in node.names} & {"job_directories", "job_inodes"}
    assert imported <= types


def test_no_allowance_is_for_a_module_that_is_gone() -> None:
    assert set(ALLOWED) <= set(MODULES)


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("os.chown(path, 0, 0)", "os.chown"),
        ("os.truncate(path, 0)", "os.truncate"),
        ("open(path, 'r+b')", "open"),
        ("open(path, mode=given)", "open"),
        ("path.open('w')", "Path.open"),
        ("path.write_bytes(b'')", "Path.write_bytes"),
        ("path.replace(other)", "Path.replace"),
        ("shutil.copyfile(a, b)", "shutil.copyfile"),
        ("stack.callback(shutil.rmtree, top)", "shutil.rmtree"),
        ("from os import chown", "from os import chown"),
        ("import os as system", "import os as system"),
        ("from icecore.host.kernel.filesystem import rename", "filesystem.rename"),
    ],
)
def test_the_reader_sees_calls_that_write(line: str, call: str) -> None:
    assert writing_calls(line) == {call}


def test_the_reader_leaves_others_alone() -> None:
    assert (
        writing_calls("text.replace('a', 'b'); replace(one, a=1); open(path, 'rb'); backend.open()")
        == set()
    )

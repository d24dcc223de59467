"""The shape of the tree: who may import whom, what is pure, what is installed; read from the sources."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("icecore", "store", "host", "dumper", "restorer", "service")

GROUND = {"icecore.errors", "icecore.events", "icecore.config", "icecore.private", "icecore.text"}
# floor -> the floors whose modules it may import, its own included
MAY_IMPORT = {
    "ground": {"ground"},
    "store": {"ground", "store"},
    "host": {"ground", "host"},
    "dumper": {"ground", "store", "host", "dumper"},
    "restorer": {"ground", "store", "host", "restorer"},
    "service": {"ground", "store", "host", "dumper", "restorer", "service"},
    "face": {"ground", "store", "host", "dumper", "restorer", "service", "face"},
}

# Inside the store: formats turn bytes into values and back, backends move bytes, and neither knows the other.
FORMATS = {
    f"icecore.store.{name}" for name in ("cell", "codec", "chunk", "shard", "cellmap", "manifest", "segment", "state")
}
BACKENDS = {f"icecore.store.{name}" for name in ("backend", "local", "memory", "s3")}
DOES_IO = {
    "asyncio",
    "aiohttp",
    "boto3",
    "http",
    "io",
    "mmap",
    "os",
    "pathlib",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
}


@dataclass(frozen=True)
class Module:
    """A module of the tree under the name it is installed with."""

    name: str
    path: Path

    @property
    def floor(self) -> str:
        """The floor it lives on; icecore's own modules are the ground floor or, all others, the public face."""
        if self.name in GROUND:
            return "ground"
        part = self.name.split(".")[1] if "." in self.name else ""
        return part if part in FOLDERS[1:] else "face"

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            top = ("icecore",) if folder == "icecore" else ("icecore", folder)
            found.append(Module(".".join(top + (inner[:-1] if inner[-1] == "__init__" else inner)), path))
    return tuple(found)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(module: Module, names: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and target of every import, wherever it stands; `names` are the modules that exist in the tree."""
    for node in ast.walk(parsed(module.path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in names else base


def target_floor(target: str) -> str | None:
    """Floor of an imported module of ours, None for one that is not ours."""
    return Module(target, ROOT).floor if target.split(".")[0] == "icecore" else None


def test_the_tree_was_read() -> None:
    names = {module.name for module in modules()}
    assert {"icecore", "icecore.store", "icecore.host", "icecore.dumper", "icecore.restorer", "icecore.errors"} <= names


def test_floors() -> None:
    names = frozenset(module.name for module in modules())
    wrong = [
        f"{module.path.relative_to(ROOT)}:{line}: {module.floor} imports {target} ({target_floor(target)})"
        for module in modules()
        if module.name != "icecore"  # the face's own __init__ has a rule of its own, below
        for line, target in imports(module, names)
        if (floor := target_floor(target)) is not None and floor not in MAY_IMPORT[module.floor]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_floor_test_can_fail(tmp_path: Path) -> None:
    """It sees relative imports, imports inside functions and `from icecore import name`."""
    path = tmp_path / "log.py"
    path.write_text(
        "from ..host import procfs\n"
        "def f():\n    import icecore.dumper.window\n"
        "from icecore import Repository, errors\n"
    )
    found = list(imports(Module("icecore.store.log", path), frozenset({"icecore.host.procfs", "icecore.errors"})))
    targets = sorted((target, target_floor(target)) for _, target in found)
    assert targets == [
        ("icecore", "face"),
        ("icecore.dumper.window", "dumper"),
        ("icecore.errors", "ground"),
        ("icecore.host.procfs", "host"),
    ]


@pytest.mark.parametrize("module", ["icecore.dumper.guard", "icecore.host.cuda.helper", "icecore.restorer.guard_process"])
def test_what_every_dump_or_restore_starts_loads_nothing_heavy(module: str) -> None:
    """Each is a process of its own: numpy alone is three quarters of the start of one that has it."""
    done = subprocess.run([sys.executable, "-P", "-c", f"import sys, {module}; print(*sys.modules)"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & {"numpy", "zstandard", "rich", "numcodecs", "google.protobuf", "asyncio"}


def test_importing_icecore_loads_nothing_heavy() -> None:
    code = "import sys, icecore; print(*sorted(n for n in sys.modules if n.startswith('icecore.') or n in HEAVY))"
    heavy = "HEAVY = {'numpy', 'msgspec', 'zstandard', 'rich', 'numcodecs', 'google.protobuf', 'asyncio'}\n"
    done = subprocess.run([sys.executable, "-P", "-c", heavy + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= GROUND


def test_formats_do_no_io_and_backends_know_no_format() -> None:
    names = frozenset(module.name for module in modules())
    wrong = []
    for module in modules():
        for line, target in imports(module, names):
            where = f"{module.path.relative_to(ROOT)}:{line}"
            if module.name in FORMATS and (target.split(".")[0] in DOES_IO or target in BACKENDS):
                wrong.append(f"{where}: a format module imports {target}")
            if module.name in BACKENDS and target in FORMATS:
                wrong.append(f"{where}: a backend imports the format {target}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    silent = [str(module.path.relative_to(ROOT)) for module in modules() if not ast.get_docstring(parsed(module.path))]
    assert not silent


def test_the_core_never_prints_and_keeps_no_global_state() -> None:
    wrong = []
    for module in modules():
        for node in ast.walk(parsed(module.path)):
            where = f"{module.path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Global):
                wrong.append(f"{where}: global {', '.join(node.names)}")
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if prints and module.floor != "face":
                wrong.append(f"{where}: print()")
    assert not wrong, "\n".join(wrong)


def test_pyproject_lists_every_package() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {module.name for module in modules() if module.path.name == "__init__.py"}
    assert sorted(setuptools["packages"]) == sorted(packages)
    top = {"icecore", *(f"icecore.{folder}" for folder in FOLDERS[1:])}
    folders = {name: name.rpartition(".")[2] for name in packages & top}  # those below find theirs through their parent
    assert setuptools["package-dir"] == folders


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if (ROOT / folder).is_dir()])
def test_the_installed_package_is_the_tree(folder: str) -> None:
    """Every file of the tree is installed with the same content: what is tested is what is here."""
    spec = importlib.util.find_spec("icecore" if folder == "icecore" else f"icecore.{folder}")
    assert spec is not None and spec.origin is not None
    place = Path(spec.origin).parent
    files = [
        path.relative_to(ROOT / folder)
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".so", ".o"}
    ]
    assert files
    stale = [str(file) for file in files if not same(ROOT / folder / file, place / file)]
    assert not stale, f"not installed as they are in the tree: {stale}; 'make test' installs anew (see package-data)"


def same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()

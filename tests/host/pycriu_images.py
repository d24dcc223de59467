"""CRIU's own Python package, as the reference that the product's reading of images is compared
with.

It comes with CRIU, outside any package index, and requires protobuf older than 7.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from icecore.host.criu.program import Criu

_SYSTEM_PYTHON = Path("/usr/lib/python3/dist-packages")


def pycriu_folder(criu: Criu) -> Path:
    """Return the folder that holds the pycriu of a CRIU: the one that tools/install-criu recorded,
    else the system's.
    """
    try:
        record = json.loads((criu.path.parent.parent / "criu.json").read_text())
        return Path(record["pycriu_path"])
    except FileNotFoundError:
        return _SYSTEM_PYTHON


def load_pycriu(criu: Criu) -> ModuleType:
    """Import pycriu. A process can import only one: the first stays."""
    if "pycriu" in sys.modules:
        return sys.modules["pycriu"]
    # Found by its own path: the folder it lies in may be the system's, whose other packages must
    # not become importable.
    package = pycriu_folder(criu) / "pycriu"
    spec = importlib.util.spec_from_file_location(
        "pycriu", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pycriu"] = module
    spec.loader.exec_module(module)
    return module


def image_as_dict(path: Path, criu: Criu) -> dict[str, Any]:
    """Return any image as a dict."""
    with open(path, "rb") as file:
        image: dict[str, Any] = load_pycriu(criu).images.load(file)
    return image


def write_dict(path: Path, image: dict[str, Any], criu: Criu) -> None:
    """Write what `image_as_dict` returned, perhaps changed."""
    with open(path, "wb") as file:
        load_pycriu(criu).images.dump(image, file)

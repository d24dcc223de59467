"""Loads the configuration from layered TOML files and the environment.

Every wrong value is an error that names the file, the key and what is expected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from icecore.config import PREFIX, Config, every_setting, variable
from icecore.config.kinds import Kind
from icecore.errors import NotFound, UsageError
from icecore.private import require_unchangeable

_WHY_OWN = "its settings include commands that run as you"
#: Old names of settings, which still work.
_RENAMED = {
    ("dump", "tcp"): ("dump", "connections"),
    ("restore", "tcp"): ("restore", "connections"),
}


def _changed(config: Config, section: str, key: str, value: Any) -> Config:
    if not section:
        return replace(config, **{key: value})
    return replace(config, **{section: replace(getattr(config, section), **{key: value})})


def merge(config: Config, table: Mapping[str, Any], where: str) -> Config:
    """Return ``config`` with the values of one TOML document.

    Args:
        where: The file, for messages.

    Raises:
        UsageError: A section or key is unknown, or a value is invalid.
    """
    known = {(section, key): kind for section, key, kind, _ in every_setting()}
    if clash := [name for name in _RENAMED if _has(table, *name) and _has(table, *_RENAMED[name])]:
        (section, old), (_, new) = clash[0], _RENAMED[clash[0]]
        raise UsageError(
            f"{where}: {section}.{old} and {section}.{new} are one setting", cure=f"remove {old}"
        )
    sections = {section for section, _ in known if section}
    for name, value in table.items():
        inner: Iterable[tuple[str, str, Any]] = [("", name, value)]
        if name in sections:
            if not isinstance(value, dict):
                raise UsageError(
                    f"{where}: [{name}] is a section, not {value!r}",
                    cure=f"write [{name}] on a line of its own",
                )
            inner = [(name, key, value[key]) for key in value]
        for section, key, given in inner:
            section, key = _RENAMED.get((section, key), (section, key))
            kind = known.get((section, key))
            full = f"{section}.{key}" if section else key
            if kind is None:
                raise UsageError(f"{where}: there is no setting {full}", cure=_suggest(full, known))
            try:
                config = _changed(config, section, key, kind.read(given))
            except (ValueError, TypeError):
                raise UsageError(
                    f"{where}: {full} = {given!r} is wrong", cure=f"give {kind.expects}"
                ) from None
    return config


def _has(table: Mapping[str, Any], section: str, key: str) -> bool:
    inner = table.get(section)
    return isinstance(inner, dict) and key in inner


def _suggest(name: str, known: Mapping[tuple[str, str], Kind[Any]]) -> str:
    from difflib import get_close_matches

    names = [f"{section}.{key}" if section else key for section, key in known]
    near = get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else "configs/icecore.toml lists all settings"


def override(config: Config, environment: Mapping[str, str]) -> Config:
    """Return ``config`` with the values of the environment.

    Raises:
        UsageError: A variable of a known section names an unknown key, or a value is invalid.
    """
    known = {
        variable(section, key): (section, key, kind) for section, key, kind, _ in every_setting()
    }
    for old, new in _RENAMED.items():
        if variable(*new) not in environment:
            known[variable(*old)] = known[variable(*new)]
    sections = tuple({f"{PREFIX}{section.upper()}_" for section, *_ in known.values() if section})
    for name, text in environment.items():
        if name in known:
            section, key, kind = known[name]
            try:
                config = _changed(config, section, key, kind.parse(text))
            except ValueError:
                raise UsageError(
                    f"environment: {name}={text!r} is wrong", cure=f"give {kind.expects}"
                ) from None
        elif name.startswith(sections):
            raise UsageError(
                f"environment: {name} overrides no setting",
                cure=f"unset it, or one of {', '.join(_of(name, known))}",
            )
    return config


def _of(name: str, known: Mapping[str, object]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(name, list(known), 3, 0.0)


def standard_files(environment: Mapping[str, str], directory: Path) -> list[Path]:
    """Return the standard configuration files, lowest priority first: the machine's, the user's, the
    working directory's.
    """
    own = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    return [Path("/etc/icecore.toml"), Path(own) / "icecore.toml", directory / "icecore.toml"]


def read_file(path: Path) -> dict[str, Any] | None:
    """Return the document in a file, or None if the file does not exist.

    Raises:
        UsageError: The file cannot be read, is not TOML, or can be changed by others: settings
            include commands that run.
    """
    try:
        # Opening another user's FIFO must not block before its owner is checked.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            require_unchangeable(path, os.fstat(descriptor), _WHY_OWN)
            os.set_blocking(descriptor, True)
            data = file.read(1 << 20)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", cure="correct its permissions or remove it"
        ) from error
    import tomllib

    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not TOML: {error}", cure="correct it; configs/icecore.toml is an example"
        ) from error


def load(
    path: str = "",
    *,
    environment: Mapping[str, str] | None = None,
    files: Sequence[Path] | None = None,
) -> Config:
    """Load the configuration: defaults, /etc/icecore.toml, ~/.config/icecore.toml, ./icecore.toml,
    ``path``, the environment. Later sources override earlier ones key by key.

    Args:
        path: An additional file, which must exist. If empty: the file that ICECORE_CONFIG names, if
            any.
        environment: Default: this process's environment.
        files: Default: the three standard files.

    Raises:
        NotFound: The file ``path`` does not exist.
        UsageError: A value is wrong; the message names the file, the key, the value and what is
            expected.
    """
    environment = os.environ if environment is None else environment
    config = Config()
    for file in standard_files(environment, Path.cwd()) if files is None else files:
        table = read_file(file)
        if table is not None:
            config = merge(config, table, str(file))
    named = path or environment.get("ICECORE_CONFIG", "")
    if named:
        table = read_file(Path(named))
        if table is None:
            raise NotFound(
                f"there is no configuration file {named}", cure="correct --config or ICECORE_CONFIG"
            )
        config = merge(config, table, named)
    return override(config, environment)

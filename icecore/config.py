"""Configuration from layered TOML files and the environment.

Every wrong value is an error that names the file, the key and what is expected.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from icecore.errors import NotFound, UsageError
from icecore.private import require_unchangeable
from icecore.text import harmless

T = TypeVar("T")

#: Prefix of the environment variables that override keys: ICECORE_<SECTION>_<KEY>, or ICECORE_<KEY>
#: for top-level keys.
PREFIX = "ICECORE_"
#: Variables that hold a secret. Jobs and hooks never inherit them.
SECRET = ("ICECORE_PASSPHRASE", "ICECORE_NEW_PASSPHRASE", "ICECORE_TARGET_PASSPHRASE")
#: Variables that give access to a repository: sources of boto3's credentials and of passphrases.
#: A job inherits one of them only if the user names it.
CREDENTIALS = (
    *SECRET,
    *(
        f"{name}_{kind}"
        for name in ("ICECORE_PASSPHRASE", "ICECORE_TARGET_PASSPHRASE")
        for kind in ("FILE", "COMMAND")
    ),
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "BOTO_CONFIG",
)
_WHY_OWN = "its settings include commands that run as you"
_SIZES = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4} | {
    f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)
}
_SIZES |= {f"{letter}b": _SIZES[letter] for letter in "kmgt"}
_DAY = 86400.0
_TIMES = {
    "": 1.0,
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": _DAY,
    "w": 7 * _DAY,
    "mo": 30 * _DAY,
    "y": 365 * _DAY,
}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")
_NUMBERS = re.compile(rf"(?:{_NUMBER.pattern})+")
#: More than the cores of any machine; starting tens of thousands of threads fails.
_MOST_THREADS = 1024
_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True)
class Kind(Generic[T]):
    """The type of a setting.

    Attributes:
        expects: A description of valid values, for messages.
        read: Converts a TOML value; raises ValueError or TypeError.
        parse: Converts text from the environment or the command line; raises ValueError.
        short: The placeholder for a value in usage lines.
        words: All valid values, if the type is an enumeration.
    """

    expects: str
    read: Callable[[Any], T]
    parse: Callable[[str], T]
    short: str = "TEXT"
    words: tuple[str, ...] = ()

    def __call__(self, text: str) -> T:
        """Parse the text; raise the error that argparse reports."""
        try:
            return self.parse(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not {self.expects}") from None


def _quantity(text: str, units: Mapping[str, float]) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ValueError(text)
    return float(match[1]) * units[match[2].lower()]


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``2 GiB``, ``500MB`` or ``4096``; binary units have an i.

    Raises:
        ValueError: The text is not a size.
    """
    return int(_quantity(text, _SIZES))


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as ``30``, ``250ms``, ``5min``, ``36h``, ``2w 3d`` or
    ``1y6mo`` (a month has 30 days, a year 365).

    Raises:
        ValueError: The text is not a duration.
    """
    if not _NUMBERS.fullmatch(text):
        raise ValueError(text)
    return sum(_quantity(part[0], _TIMES) for part in _NUMBER.finditer(text))


def _refuse(value: Any) -> Any:
    raise ValueError(value)


def _number(
    parse: Callable[[str], T], made: Callable[[Any], T], *wanted: type
) -> Callable[[Any], T]:
    def read(value: Any) -> T:
        if isinstance(value, str):
            return parse(value)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise TypeError(value)
        number: Any = value
        return made(number) if 0 <= number < 2**63 else _refuse(value)

    return read


def _count(text: str | int) -> int:
    value = int(text)
    return value if 0 <= value < 2**31 else _refuse(value)


def _threads(text: str | int) -> int:
    value = _count(text)
    return value if value <= _MOST_THREADS else _refuse(value)


def _kept(text: str) -> int:
    return -1 if text == "all" else _count(text)


def _share(value: str | float) -> float:
    text = str(value).strip()
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    return share if 0 < share <= 1 else _refuse(value)


def _share_or_auto(value: str | float) -> float:
    """Return a share of at least 1 %; of ``auto``, and 0: 0."""
    if value in ("auto", 0) or str(value).strip() in ("0", "0.0"):
        return 0.0
    share = _share(value)
    return share if share >= 0.01 else _refuse(value)


def _plain(text: str) -> str:
    return text if "\0" not in text else _refuse(text)


def _label(text: str) -> str:
    return text if text.strip() and harmless(text) == text else _refuse(text)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(value)
    return tuple(_plain(one) for one in value)


SIZE: Kind[int] = Kind(
    "a size such as '2 GiB' or a number of bytes", _number(parse_size, int, int), parse_size, "SIZE"
)
SECONDS: Kind[float] = Kind(
    "a duration such as '30 s' or a number of seconds",
    _number(parse_seconds, float, int, float),
    parse_seconds,
    "DURATION",
)
COUNT: Kind[int] = Kind("a whole number, 0 or more", _number(_refuse, _count, int), _count, "N")
THREADS: Kind[int] = Kind(
    f"a whole number from 0 to {_MOST_THREADS}", _number(_refuse, _threads, int), _threads, "N"
)
TEXT: Kind[str] = Kind(
    "a text", lambda value: _plain(value) if isinstance(value, str) else _refuse(value), _plain
)
DIRECTORY: Kind[str] = replace(TEXT, short="DIR")
FILE: Kind[str] = replace(TEXT, short="FILE")
COMMAND: Kind[str] = replace(TEXT, short="COMMAND")
URL: Kind[str] = replace(TEXT, short="URL")
PLACE: Kind[str] = replace(TEXT, short="PLACE")
GROUP: Kind[str] = replace(TEXT, short="GROUP")
ADDRESS: Kind[str] = replace(TEXT, short="HOST:PORT")
LABEL: Kind[str] = Kind(
    "a label: a text that is not empty, without control characters",
    lambda value: _label(value) if isinstance(value, str) else _refuse(value),
    _label,
    "LABEL",
)
KEEP: Kind[int] = Kind(
    "a whole number, 0 or more, or 'all'", _number(_kept, _count, int), _kept, "N"
)
SHARE: Kind[float] = Kind(
    "a share such as '1%' or 0.01", _number(_share, float, int, float), _share, "SHARE"
)
SHARE_OR_AUTO: Kind[float] = Kind(
    "a share from 1% to 100%, or 'auto'",
    _number(_share_or_auto, _share_or_auto, float, int),
    _share_or_auto,
    "SHARE|auto",
)
SWITCH: Kind[bool] = Kind(
    "true or false",
    lambda value: value if isinstance(value, bool) else _refuse(value),
    lambda text: _WORDS[text.lower()] if text.lower() in _WORDS else _refuse(text),
)


PLACES: Kind[tuple[str, ...]] = Kind(
    "a list of texts", _texts, lambda text: tuple(text.split()), "PLACE …"
)


def choice(*words: str) -> Kind[Any]:
    """Return the type whose values are ``words``."""

    def parse(text: Any) -> str:
        return text if isinstance(text, str) and text in words else _refuse(text)

    return Kind("one of " + ", ".join(f'"{word}"' for word in words), parse, parse, words=words)


def _setting(default: T, kind: Kind[T]) -> T:
    made: T = field(default=default, metadata={"kind": kind})
    return made


@dataclass(frozen=True)
class DumpSettings:
    """[dump]: defaults of ``icecore dump``, explained in `icecore.dumper.options.DumpOptions`."""

    max_window: float = _setting(30.0, SECONDS)
    pre_copy: Literal["auto", "on", "off"] = _setting("auto", choice("auto", "on", "off"))
    memory: Literal["in-place", "streamed"] = _setting("in-place", choice("in-place", "streamed"))
    staging_bytes: int = _setting(2 << 30, SIZE)
    scan_threads: int = _setting(0, THREADS)
    background_cpu: float = _setting(0.0, SHARE_OR_AUTO)
    files: Literal["content", "check"] = _setting("content", choice("content", "check"))
    with_files: bool = _setting(False, SWITCH)
    verify_files: bool = _setting(False, SWITCH)
    file_budget: int = _setting(4 << 30, SIZE)
    data_budget: int = _setting(1 << 30, SIZE)
    ghost_limit: int = _setting(1 << 30, SIZE)
    connections: Literal["keep", "close"] = _setting("keep", choice("keep", "close"))
    link_rate: int = _setting(0, SIZE)
    workdir: str = _setting("/dev/shm", DIRECTORY)
    gpu_lock: float = _setting(10.0, SECONDS)
    gpu_shared: bool = _setting(False, SWITCH)
    populate: bool = _setting(True, SWITCH)
    criu_plugins: str = _setting("", DIRECTORY)
    before: str = _setting("", COMMAND)
    after: str = _setting("", COMMAND)
    hook_seconds: float = _setting(300.0, SECONDS)


@dataclass(frozen=True)
class RestoreSettings:
    """[restore]: defaults of ``icecore restore``, explained in
    `icecore.restorer.options.RestoreOptions`.

    ``after`` is a shell command that runs once the restored job runs; ``hook_seconds`` limits its
    run time.
    """

    mode: Literal["full", "lazy"] = _setting("full", choice("full", "lazy"))
    files: Literal["auto", "restore", "truncate", "leave"] = _setting(
        "auto", choice("auto", "restore", "truncate", "leave")
    )
    verify_files: bool = _setting(False, SWITCH)
    connections: Literal["keep", "close"] = _setting("keep", choice("keep", "close"))
    budget_bytes: int = _setting(0, SIZE)
    threads: int = _setting(0, THREADS)
    placers: int = _setting(0, THREADS)
    workdir: str = _setting("", DIRECTORY)
    criu_seconds: float = _setting(120.0, SECONDS)
    criu_plugins: str = _setting("", DIRECTORY)
    stall_seconds: float = _setting(60.0, SECONDS)
    attempts: int = _setting(4, COUNT)
    after: str = _setting("", COMMAND)
    hook_seconds: float = _setting(300.0, SECONDS)


@dataclass(frozen=True)
class RunSettings:
    """[run]: defaults of ``icecore run``: which namespaces a job shares with the host, whether a
    GPU job's device memory is resident, and whether it outlives a crash.
    """

    pid: Literal["host", "private"] = _setting("private", choice("host", "private"))
    ipc: Literal["host", "private"] = _setting("private", choice("host", "private"))
    network: Literal["host", "private"] = _setting("host", choice("host", "private"))
    root: Literal["host", "private"] = _setting("host", choice("host", "private"))
    resident: bool = _setting(True, SWITCH)
    keep_resident: bool = _setting(False, SWITCH)


@dataclass(frozen=True)
class ScheduleSettings:
    """[schedule]: how ``icecore run`` looks after a job with ``--every auto``, and how it meets a
    notice. The meaning of each is in `icecore.service.supervision.plan.Plan`.
    """

    max_overhead: float = _setting(0.01, SHARE)
    max_loss: float = _setting(1800.0, SECONDS)
    failure_seconds: float = _setting(86400.0, SECONDS)
    slow_down: float = _setting(0.02, SHARE)
    notice: float = _setting(0.0, SECONDS)
    notice_command: str = _setting("", COMMAND)
    notice_url: str = _setting("", URL)
    requeue_command: str = _setting("", COMMAND)
    preempted_exit: int = _setting(85, COUNT)


@dataclass(frozen=True)
class ForgetSettings:
    """[forget]: the retention policy of ``icecore forget`` for each job, unless ``--keep-…`` options
    override it. 0 disables a rule; -1 ("all") removes its bound.
    """

    keep_last: int = _setting(0, KEEP)
    keep_hourly: int = _setting(0, KEEP)
    keep_daily: int = _setting(0, KEEP)
    keep_weekly: int = _setting(0, KEEP)
    keep_monthly: int = _setting(0, KEEP)
    keep_yearly: int = _setting(0, KEEP)
    keep_within: float = _setting(0.0, SECONDS)


@dataclass(frozen=True)
class GcSettings:
    """[gc]: settings of ``icecore gc``.

    ``fence_seconds`` is the silence after which a session counts as dead; its work is then void.
    """

    fence_seconds: float = _setting(1800.0, SECONDS)


@dataclass(frozen=True)
class S3Settings:
    """[s3]: access to buckets. boto3 resolves empty settings from the environment, ~/.aws and the
    machine's role.

    Attributes:
        endpoint, region, profile, addressing: See `icecore.store.backend.s3.S3Place`.
        requests: Maximum number of concurrent requests.
        budget_bytes: Maximum bytes of concurrent requests.
        patience: Seconds without a response after which a request fails.
        attempts: How often a request is sent before its failure is final.
    """

    endpoint: str = _setting("", TEXT)
    region: str = _setting("", TEXT)
    profile: str = _setting("", TEXT)
    addressing: Literal["auto", "path", "virtual"] = _setting(
        "auto", choice("auto", "path", "virtual")
    )
    requests: int = _setting(64, COUNT)
    budget_bytes: int = _setting(512 << 20, SIZE)
    patience: float = _setting(60.0, SECONDS)
    attempts: int = _setting(10, COUNT)


@dataclass(frozen=True)
class CacheSettings:
    """[cache]: a local cache of what was read from buckets, in ``directory``, of at most ``bytes``
    bytes. Without a directory there is no cache.
    """

    directory: str = _setting("", DIRECTORY)
    bytes: int = _setting(20 << 30, SIZE)


@dataclass(frozen=True)
class ServiceSettings:
    """[service]: the node service, ``icecore serve``.

    Attributes:
        socket: Its unix socket; clients use it where it exists.
        admin_group: Members of this group see and touch the jobs of all users, as root does.
        others: What other users may do with their own jobs.
        repository: Where the snapshots of a user's jobs are; ``{user}`` and ``{uid}`` are replaced.
            Empty: in the repository of all.
        listen: ``HOST:PORT`` for clients with tokens; empty: only the socket.
        certificate, key: PEM files for TLS.
        plain_loopback: Listen without TLS, on a loopback address only.
        connections: Maximum number of connections.
        requests: Requests a second of one caller in the long run.
        operations: Maximum number of operations at a time, besides supervised jobs.
        operations_per_user: The same for one user.
        supervised_per_user: Maximum number of supervised jobs of one user.
        audit_bytes: Size at which each file of the audit log is rotated.
    """

    socket: str = _setting("/run/icecore/service.sock", FILE)
    admin_group: str = _setting("", GROUP)
    others: Literal["operate", "read", "none"] = _setting(
        "operate", choice("operate", "read", "none")
    )
    repository: str = _setting("", PLACE)
    listen: str = _setting("", ADDRESS)
    certificate: str = _setting("", FILE)
    key: str = _setting("", FILE)
    plain_loopback: bool = _setting(False, SWITCH)
    connections: int = _setting(512, COUNT)
    requests: int = _setting(100, COUNT)
    operations: int = _setting(8, COUNT)
    operations_per_user: int = _setting(4, COUNT)
    supervised_per_user: int = _setting(64, COUNT)
    audit_bytes: int = _setting(16 << 20, SIZE)


@dataclass(frozen=True)
class Config:
    """All settings.

    Attributes:
        repository: The default repository; if empty, commands require ``--repository``.
        criu: The CRIU program; if empty, the one that tools/install-criu installed, else the one in
            PATH.
        replicas: Locations of the repository's replicas, nearest first.
        passphrase_file: A file that holds the passphrase of an encrypted repository.
        passphrase_command: A shell command that prints the passphrase.
        plain_places: Places whose repositories are plain on purpose, although a passphrase is
            configured.
        state: Directory for the jobs of this node and for the records of known repositories; if
            empty, /var/lib/icecore, or a directory below ~/.local/state for users other than root.
    """

    repository: str = _setting("", PLACE)
    replicas: tuple[str, ...] = _setting((), PLACES)
    passphrase_file: str = _setting("", FILE)
    passphrase_command: str = _setting("", COMMAND)
    plain_places: tuple[str, ...] = _setting((), PLACES)
    criu: str = _setting("", FILE)
    state: str = _setting("", DIRECTORY)
    dump: DumpSettings = DumpSettings()
    restore: RestoreSettings = RestoreSettings()
    run: RunSettings = RunSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    forget: ForgetSettings = ForgetSettings()
    gc: GcSettings = GcSettings()
    s3: S3Settings = S3Settings()
    cache: CacheSettings = CacheSettings()
    service: ServiceSettings = ServiceSettings()


#: Old names of settings, which still work.
_RENAMED = {
    ("dump", "tcp"): ("dump", "connections"),
    ("restore", "tcp"): ("restore", "connections"),
}


def _kind(about: Field[Any]) -> Kind[Any] | None:
    kind = about.metadata.get("kind")
    return kind if isinstance(kind, Kind) else None


def every_setting(config: Config | None = None) -> Iterator[tuple[str, str, Kind[Any], Any]]:
    """Yield section ("" for top-level keys), key, type and value of every setting.

    Args:
        config: Default: the built-in defaults.
    """
    config = config or Config()
    for about in fields(config):
        value = getattr(config, about.name)
        kind = _kind(about)
        if kind is not None:
            yield "", about.name, kind, value
        else:
            for inner in fields(value):
                kind = _kind(inner)
                assert kind is not None
                yield about.name, inner.name, kind, getattr(value, inner.name)


def variable(section: str, key: str) -> str:
    """Return the environment variable that overrides a key."""
    return PREFIX + (f"{section}_{key}" if section else key).upper()


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


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without secrets."""
    return {name: value for name, value in environment.items() if name not in SECRET}


def job_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the part of the environment that a job inherits, and the names of the credentials that
    it does not inherit.
    """
    held = [name for name in CREDENTIALS if name in environment]
    return {name: value for name, value in environment.items() if name not in held}, held


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

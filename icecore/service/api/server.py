"""Run the service: listen on its sockets, notify the service manager, and shut down in order."""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import os
import resource
import signal
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from icecore.config import ServiceSettings
from icecore.errors import JobHeld, UsageError
from icecore.events import Event, Sink
from icecore.host.kernel.libc import return_free_memory
from icecore.host.kernel.limits import raise_descriptor_limit
from icecore.private import private_state, require_own
from icecore.service.api.connections import Connections, Door, Guard
from icecore.service.api.service import Service
from icecore.service.api.tokens import FOLDER

_BACKLOG = 128
_HANDSHAKE_SECONDS = 10.0
_DRAIN_SECONDS = 5.0
_FIRST_PASSED = 3  # sd_listen_fds(3)
_KEEP_ALIVE_SECONDS = 75.0
_TEND_SECONDS = 60.0
_TRIM_SECONDS = 5.0
#: The service's nice value is lower than that of jobs by this much.
_BEFORE_JOBS = 10


async def serve(service: Service, app: web.Application, emit: Sink) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP.

    Operations continue; the next service adopts them.

    Raises:
        JobHeld: Another service of this state directory runs.
        UsageError: A setting is wrong, or an address is taken.
    """
    settings = service.config.service
    held = _lock(service.registry.state)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    service.operations.descriptors = files  # select(2) of a job may not cope with more
    priority = service.operations.priority = _raise_priority()
    try:
        raise_descriptor_limit()  # a connection takes two
        listening = [_unix_socket(settings.socket)]
        context = None
        if settings.listen:
            context = _tls(settings)
            listening.append(_tcp_socket(settings.listen, plain=context is None))
        await service.operations.recover()
        await _serve_on(service, app, listening, context, emit)
    finally:
        await service.operations.close()
        service.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        if priority is not None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, priority)
        os.close(held)


async def _serve_on(
    service: Service,
    app: web.Application,
    listening: list[socket.socket],
    context: ssl.SSLContext | None,
    emit: Sink,
) -> None:
    runner = web.AppRunner(
        app, access_log=None, keepalive_timeout=_KEEP_ALIVE_SECONDS, shutdown_timeout=_DRAIN_SECONDS
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    settings, own = service.config.service, _inode(service.config.service.socket)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    assert runner.server is not None
    make = guarded(runner.server, service.connections)
    servers = []
    for one in listening:
        tls = context if one.family != socket.AF_UNIX else None
        servers.append(
            await loop.create_server(
                make if tls is None else behind_tls(make, tls), sock=one, backlog=_BACKLOG
            )
        )
        emit(Event("serve.listening", {"at": _name(one), "tls": tls is not None}))
    upkeep = (_beat(), _tend(service, emit), _trim(service, emit))
    others = [asyncio.create_task(one) for one in upkeep]
    notify("READY=1")
    try:
        await stop.wait()
    finally:
        notify("STOPPING=1")
        service.stopping = True
        for other in others:
            other.cancel()
        for server in servers:
            server.close()
        if own is not None:
            _remove(settings.socket, own)
        await runner.cleanup()
        emit(Event("serve.stopped", {}))


def _raise_priority() -> int | None:
    """Lower the nice value of this thread, which new threads inherit, so that the service answers on
    a busy node. Return the old value; None: it could not be lowered.

    It counts only within a cgroup and a session (sched(7), autogroup). Where the kernel groups by
    session and this one is the service's alone, the session's value is lowered, too.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, max(-20, before - _BEFORE_JOBS))
    except OSError:
        return None
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(-_BEFORE_JOBS))
    return before


def guarded(make: Callable[[], asyncio.Protocol], connections: Connections) -> Callable[[], Guard]:
    """Return a factory of protocols that counts connections and ends slow ones."""
    return lambda: Guard(make, connections)


def behind_tls(make: Callable[[], Guard], context: ssl.SSLContext) -> Callable[[], Door]:
    """Return a factory of protocols that counts connections before their TLS handshakes."""
    return lambda: Door(make(), context, _HANDSHAKE_SECONDS)


def _lock(state: Path) -> int:
    """Take the lock of this node's service; return its descriptor."""
    folder = private_state(state, FOLDER)
    descriptor = os.open(
        folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise JobHeld(
            f"another service runs with the state directory {state}",
            cure="stop it, or set another directory (ICECORE_STATE)",
        ) from None
    return descriptor


# -- sockets


def _unix_socket(path: str) -> socket.socket:
    """Return the listening unix socket: the one that systemd passes, or a new one at ``path``.

    All users may connect; their identity decides what they may do. Only root may replace the socket.
    """
    passed = _passed()
    if passed is not None:
        return passed
    place = Path(path).absolute()
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    about = require_own(place.parent)
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"other users can write to {place.parent} and replace the service's socket",
            cure=f"chmod go-w {place.parent}",
        )
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(place).st_mode):
            raise UsageError(f"{place} is not a socket", cure="remove it, or set service.socket")
    # It gets its final name once it listens with its mode, and replaces an old socket.
    new = place.with_name(f".{place.name}.{os.getpid()}")
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            new.unlink()
        found.bind(str(new))
        os.chmod(new, 0o666)
        found.listen(_BACKLOG)
        os.rename(new, place)
    except OSError as error:
        found.close()
        raise UsageError(
            f"cannot listen on {place}: {error.strerror}", cure="set service.socket"
        ) from error
    found.setblocking(False)
    return found


def _inode(path: str) -> tuple[int, int] | None:
    """Return the identity of the socket file; None: systemd's, which stays."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        return None
    about = os.stat(path)
    return about.st_dev, about.st_ino


def _remove(path: str, inode: tuple[int, int]) -> None:
    """Remove the socket, so that clients detect at once that no service runs."""
    with suppress(OSError):
        if _inode(path) == inode:
            os.unlink(path)


def _passed() -> socket.socket | None:
    """Return the unix socket of systemd's socket activation (sd_listen_fds(3)), if there is one."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    if os.environ.get("LISTEN_FDS") != "1":
        raise UsageError("systemd passed more than one socket", cure="configure one ListenStream=")
    found = socket.socket(fileno=_FIRST_PASSED)
    if found.family != socket.AF_UNIX or found.type != socket.SOCK_STREAM:
        raise UsageError(
            "systemd passed a socket that is not a unix stream socket", cure="ListenStream=/run/…"
        )
    os.set_inheritable(_FIRST_PASSED, False)
    found.setblocking(False)
    return found


def _tcp_socket(listen: str, *, plain: bool) -> socket.socket:
    host, separator, port = listen.rpartition(":")
    host = host.strip("[]")
    if not separator or not port.isdecimal() or int(port) > 65535 or not host:
        raise UsageError(f"service.listen = {listen!r}", cure="write HOST:PORT")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if plain and not ipaddress.ip_address(address[0]).is_loopback:
            raise UsageError(
                f"{listen} is not a loopback address, and TCP without TLS sends tokens in clear text",
                cure="set service.certificate and service.key",
            )
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise UsageError(f"cannot listen on {listen}: {error.strerror}") from error
    found.setblocking(False)
    return found


def _tls(settings: ServiceSettings) -> ssl.SSLContext | None:
    """Return the TLS context; None: no TLS, which ``plain_loopback`` allows on loopback addresses.

    Raises:
        UsageError: No certificate is set and TLS is required; or the certificate cannot be read.
    """
    if not settings.certificate:
        if settings.plain_loopback:
            return None
        raise UsageError(
            "TCP without TLS sends tokens in clear text",
            cure="set service.certificate and service.key, or, on a loopback address,"
            " service.plain_loopback",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.certificate, settings.key or None)
    except OSError as error:  # also ssl.SSLError
        raise UsageError(
            f"the certificate {settings.certificate} cannot be used: {error}",
            cure="give PEM files in service.certificate and service.key",
        ) from error
    return context


def _name(listening: socket.socket) -> str:
    where = listening.getsockname()
    if isinstance(where, tuple):
        return f"{where[0]}:{where[1]}"
    return str(where)


# -- the service manager


def notify(text: str) -> None:
    """Report the service's state to systemd (sd_notify(3)); do nothing without systemd."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.sendto(text.encode(), "\0" + where[1:] if where.startswith("@") else where)


async def _beat() -> None:
    """Reset systemd's watchdog from the event loop, twice per interval (sd_watchdog_enabled(3))."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(
        os.getpid()
    ):
        return
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(int(microseconds) / 2e6)


async def _tend(service: Service, emit: Sink) -> None:
    """Now and every minute, thaw jobs that killed dumps left frozen, and return the C library's
    free memory to the system.
    """

    async def tend() -> None:
        await service.thaw_left()
        await service.locally(return_free_memory)

    await _regularly("tend", tend, _TEND_SECONDS, emit)


async def _trim(service: Service, emit: Sink) -> None:
    """Trim the logs of all jobs, now and every few seconds."""
    await _regularly("trim", service.trim_logs, _TRIM_SECONDS, emit)


async def _regularly(
    what: str, work: Callable[[], Awaitable[object]], seconds: float, emit: Sink
) -> None:
    """Do some work now and every ``seconds``. If it fails, report it, and go on."""
    while True:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - the service must not lose its upkeep
            emit(Event("serve.upkeep_failed", {"what": what, "error": repr(error)}))
        await asyncio.sleep(seconds)

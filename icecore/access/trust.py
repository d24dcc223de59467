"""Opens and creates repositories for a client, and compares them with its records.

A client's record of a place is binding: another repository there, or one that lost its encryption,
is an error. Nothing else calls `icecore.store.log.repository.StoredRepository.open` and `create`.
"""

from __future__ import annotations

import shlex

import msgspec
from blake3 import blake3

from icecore.access.passphrase import Passphrase, current, is_configured
from icecore.access.places import names_of, state_directory
from icecore.config import Config
from icecore.errors import (
    Distrusted,
    IcecoreError,
    NotFound,
    PlainRefused,
    RecordDamaged,
    RollbackDetected,
    UsageError,
)
from icecore.events import Sink, discard
from icecore.store.backend.base import Backend
from icecore.store.format.keys import Parameters
from icecore.store.log.chain import Log
from icecore.store.log.keychain import Admit
from icecore.store.log.known import Known, KnownPlace
from icecore.store.log.repository import StoredRepository
from icecore.store.log.watermark import FileWatermark, Recollection, Seen, Watermark


class Finding(msgspec.Struct, frozen=True):
    """A comparison of a place with this client's record of it.

    Attributes:
        known: The recorded repository; None if there is no record or the record is damaged.
        seen: The newest log entry of the present repository that this client has seen; None if that
            record is damaged.
        found: The repository at the place.
        newest: Its newest log entry.
        troubles: The reasons why commands refuse to open it; empty if they open it.
        continues: Whether its log continues what this client has seen.
        plain: Whether accepting it requires ``plain``.
    """

    known: Known | None
    seen: Seen | None
    found: Known
    newest: Seen
    troubles: tuple[Distrusted | RollbackDetected, ...]
    continues: bool
    plain: bool


class Client:
    """Opens and creates repositories for one client: all processes that share a state directory.

    Args:
        state: The directory of its records. Empty: this node's.
        config: Sources of passphrases, and places that are plain on purpose. None: passphrases come
            from the environment only.
    """

    def __init__(self, state: str = "", config: Config | None = None) -> None:
        self._state = state_directory(state)
        self._config = config

    async def open(
        self,
        backend: Backend,
        *,
        passphrase: Passphrase | None = None,
        secret: bytes = b"",
        plain: bool = False,
        rebuild: bool = False,
        emit: Sink = discard,
    ) -> StoredRepository:
        """Open the repository in ``backend`` if this client knows it or knows none there.

        Args:
            passphrase: Returns the passphrase. None: `icecore.access.passphrase.current`.
            secret: The master secret of a repository of which this one must be a replica; replaces
                the passphrase.
            plain: Accept a plain repository although a passphrase is configured.
            rebuild: As for `icecore.store.log.repository.StoredRepository.open`.

        Raises:
            RepositoryReplaced: Another repository is there, or it is no longer encrypted.
            PlainRefused: It is plain, a passphrase is configured, and nothing marks it as plain on
                purpose.
            RecordDamaged: This client's record of the place is damaged.
            NotFound, WrongPassphrase, FormatTooNew, Damaged: As for
                `icecore.store.log.repository.StoredRepository.open`.
        """
        place = self._place(backend)
        known = place.recall()
        given = passphrase or current(self._config)
        expected = bool(secret) or is_configured(given)

        def admit(identity: str, encrypted: bool) -> None:
            found = Known(identity, encrypted)
            place.require(found)
            if (
                not encrypted
                and expected
                and not (plain or (known is not None and known.plain) or self._meant_plain(backend))
            ):
                raise _plain_refused(backend, found)

        try:
            core = await StoredRepository.open(
                backend,
                passphrase=None if secret else given,
                secret=secret,
                recollection=self._recollection(backend),
                admit=admit,
                rebuild=rebuild,
                known=known.id if known is not None else "",
                emit=emit,
            )
        except NotFound as error:
            if known is None:
                raise
            raise NotFound(
                f"{backend.where} is no repository; this client knows {known} there",
                cure="mount it, or find out who removed it; 'icecore init' makes a new one",
            ) from error
        except UsageError:
            # The master secret differs. An error that names the repository says more, if its
            # identity is readable.
            if secret and known is not None:
                await _require_admitted(backend, admit)
            raise
        place.admit(
            Known(core.config.id, core.keys.encrypted, plain=not core.keys.encrypted and plain)
        )
        return self._remembering(core)

    async def create(
        self,
        backend: Backend,
        parameters: Parameters,
        *,
        passphrase: Passphrase | None = None,
        secret: bytes = b"",
        plain: bool = False,
        emit: Sink = discard,
    ) -> StoredRepository:
        """Create a repository and record it as the one at this place.

        Args:
            passphrase: Returns the passphrase of an encrypted repository. None: it is plain.
            secret: The master secret of the repository of which this one becomes a replica.
            plain: Allow a plain repository although this client knows an encrypted one there.

        Raises:
            PlainRefused: This client knows an encrypted repository there.
            UsageError: There already is a repository, or the place does not support one.
        """
        place = self._place(backend)
        if passphrase is None and not plain:
            _require_no_encrypted(place, backend)
        core = await StoredRepository.create(
            backend, parameters, passphrase=passphrase, secret=secret, emit=emit
        )
        place.note(Known(core.config.id, core.keys.encrypted, plain=not core.keys.encrypted))
        return self._remembering(core)

    async def examine(self, backend: Backend, *, passphrase: Passphrase | None = None) -> Finding:
        """Compare the repository at a place with this client's record; record nothing.

        Raises:
            NotFound, WrongPassphrase, FormatTooNew, Damaged: The repository cannot be opened, or
                its log cannot be read.
        """
        given = passphrase or current(self._config)
        place, troubles = self._place(backend), list[Distrusted | RollbackDetected]()
        try:
            core = await StoredRepository.open(
                backend,
                passphrase=given,
                admit=lambda identity, encrypted: place.require(Known(identity, encrypted)),
            )
        except Distrusted:
            core = await StoredRepository.open(backend, passphrase=given)
        found = Known(core.config.id, core.keys.encrypted)
        known: Known | None = None
        try:
            known = place.recall()
            place.require(found)
        except Distrusted as error:
            troubles.append(error)
        meant = (
            found.encrypted
            or (not troubles and known is not None and known.plain)
            or self._meant_plain(backend)
        )
        if not meant and not troubles and is_configured(given):
            troubles.append(_plain_refused(backend, found))
        plain = not meant and (is_configured(given) or (known is not None and known.encrypted))
        entry = await core.log.newest()
        newest = Seen(entry.generation, entry.digest.hex())
        seen: Seen | None = None
        try:
            seen = self._watermark(found.id, backend).load()
            remembered = Watermark()
            remembered.save(seen)
            await Log(backend, core.keys.log, watermark=remembered).newest()
        except (RollbackDetected, RecordDamaged) as error:
            troubles.append(error)
            return Finding(known, seen, found, newest, tuple(troubles), False, plain)
        return Finding(known, seen, found, newest, tuple(troubles), True, plain)

    async def accept(
        self,
        backend: Backend,
        identity: str,
        generation: int | None = None,
        *,
        plain: bool = False,
        passphrase: Passphrase | None = None,
    ) -> Finding:
        """Record the repository at a place, because the user accepts it.

        Args:
            identity: The id of the repository at the place.
            generation: Its newest generation; required if its log does not continue what this
                client has seen.
            plain: Accept a plain repository; required if a passphrase is configured or the record
                names an encrypted one.

        Returns:
            The comparison before the change.

        Raises:
            UsageError: Another repository or generation is there.
            PlainRefused: The repository is plain, and ``plain`` is false.
        """
        finding = await self.examine(backend, passphrase=passphrase)
        if identity != finding.found.id:
            raise UsageError(
                f"{backend.where} holds {finding.found}, not {identity}",
                cure=f"'icecore trust {backend.where}' shows it",
            )
        if finding.plain and not plain:
            raise PlainRefused(
                f"{backend.where} holds {finding.found}",
                cure=f"to accept it: {command(backend.where, finding)}",
            )
        if not finding.continues:
            if generation != finding.newest.generation:
                raise UsageError(
                    f"the log in {backend.where} ends at generation {finding.newest.generation} and does not continue what this client has seen",
                    cure=f"to accept it: {command(backend.where, finding)}",
                )
            self._watermark(finding.found.id, backend).replace(finding.newest)
        meant = not finding.found.encrypted and (
            plain or (finding.known is not None and finding.known.plain)
        )
        self._place(backend).note(Known(finding.found.id, finding.found.encrypted, plain=meant))
        return finding

    def _place(self, backend: Backend) -> KnownPlace:
        return KnownPlace(self._state / "places", backend.known_as, backend.where)

    def _meant_plain(self, backend: Backend) -> bool:
        """Return whether the configuration marks this place as plain."""
        if self._config is None:
            return False
        return any(
            not names_of(place, self._config).isdisjoint(backend.known_as)
            for place in self._config.plain_places
        )

    def _recollection(self, backend: Backend) -> Recollection:
        return Recollection(
            self._state
            / "opened"
            / blake3(backend.where.encode(errors="surrogateescape")).hexdigest()[:32]
        )

    def _watermark(self, identity: str, backend: Backend) -> FileWatermark:
        return FileWatermark(self._state / "seen" / identity, backend.where)

    def _remembering(self, core: StoredRepository) -> StoredRepository:
        """Return the repository with a log that records the newest state seen. The record is kept
        by the repository's id, because each replica has its own log.
        """
        log = Log(
            core.backend, core.keys.log, watermark=self._watermark(core.config.id, core.backend)
        )
        return StoredRepository(core.backend, core.config, core.keys, log, core.emit)


def command(place: str, finding: Finding) -> str:
    """Return the command that accepts the repository that was found."""
    generation = "" if finding.continues else f"@{finding.newest.generation}"
    plain = " --plain" if finding.plain else ""
    return f"icecore trust {shlex.quote(place)} --accept {finding.found.id}{generation}{plain}"


def _require_no_encrypted(place: KnownPlace, backend: Backend) -> None:
    try:
        known = place.recall()
    except Distrusted as error:
        words = f"the record of {backend.where} does not show whether an encrypted repository was there ({error.message})"
    else:
        if known is None or not known.encrypted:
            return
        words = f"this client knows {known} at {backend.where}"
    raise PlainRefused(
        f"{words}; the new one would be plain",
        cure="'icecore init --encrypt' makes an encrypted one, 'icecore init --plain' a plain one",
    )


async def _require_admitted(backend: Backend, admit: Admit) -> None:
    try:
        await StoredRepository.open(backend, admit=admit)
    except Distrusted:
        raise
    except IcecoreError:
        pass


def _plain_refused(backend: Backend, found: Known) -> PlainRefused:
    return PlainRefused(
        f"{backend.where} holds {found}, but a passphrase is configured: an encrypted one is expected",
        cure=f"if it is plain on purpose: icecore trust {shlex.quote(backend.where)} --accept {found.id} --plain, or name the place in plain_places",
    )

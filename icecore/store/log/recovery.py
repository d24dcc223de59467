"""The recovery file: a copy of what opens a repository, kept outside it. It is exported from a
repository that opens, and restored into one that does not.

Only objects of the same repository are restored, and intact ones are never replaced.
"""

from __future__ import annotations

import time

import msgspec

from icecore.errors import Damaged, FormatTooNew, UsageError
from icecore.events import Sink, discard
from icecore.store.backend.base import Backend
from icecore.store.format.envelope import ObjectKind, seal, unseal
from icecore.store.format.keys import PUBLIC, Config, Keys, decode_config, encode_config
from icecore.store.format.names import CONFIG
from icecore.store.format.slots import decode_slots, verify
from icecore.store.log import keychain
from icecore.store.log.identity import Mend, inspect, is_of, mend
from icecore.store.log.keychain import Newest, Passphrase, open_keys
from icecore.store.log.repository import StoredRepository

FORMAT = 1
_KIND = ObjectKind("recovery file", b"ICERECO", 1, 1 << 18, None)
#: The longest recovery file in bytes.
LIMIT = _KIND.object_limit


class Recovery(msgspec.Struct, frozen=True):
    """The contents of a recovery file.

    ``number`` and ``key`` are those of a key object: in an encrypted repository the wrapped master
    secret, otherwise the plain one. ``config`` is the object ``config``; ``created_ns`` is Unix
    time.
    """

    format: int
    number: int
    key: bytes
    config: bytes
    created_ns: int


async def export(repository: StoredRepository) -> bytes:
    """Return the recovery file of an open repository.

    Raises:
        Damaged: No key object is intact.
    """
    found = await keychain.newest(repository.backend, repository.emit)
    if found.slots is not None:
        verify(found.name, found.slots, repository.keys.secret)
    config = encode_config(repository.config, repository.keys).data
    return seal(
        _KIND,
        msgspec.msgpack.encode(Recovery(FORMAT, found.number, found.data, config, time.time_ns())),
        PUBLIC,
    ).data


def decode(name: str, data: bytes) -> Recovery:
    """Return the content of recovery file ``name``.

    Raises:
        Damaged: It is not a recovery file, or it was changed.
        FormatTooNew: A later version wrote it.
    """
    try:
        recovery = msgspec.msgpack.decode(unseal(_KIND, name, data, PUBLIC), type=Recovery)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(_KIND.title, name, str(error), cure=_ANOTHER) from error
    except Damaged as error:
        raise Damaged(error.kind, error.name, error.why, cure=_ANOTHER) from error
    if recovery.format > FORMAT:
        raise FormatTooNew(
            f"recovery file {name} has format {recovery.format}, this icecore reads up to {FORMAT}",
            cure="use a newer icecore",
        )
    return recovery


_ANOTHER = "use another copy of the file"


class Restorer:
    """Restores a recovery file into its repository.

    Args:
        name: The file's name, for messages.
        passphrase: Opens the slots in it, if the repository is encrypted.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        data: bytes,
        passphrase: Passphrase | None,
        *,
        emit: Sink = discard,
    ) -> None:
        self._backend = backend
        self._name = name
        self._recovery = decode(name, data)
        self._passphrase = passphrase
        self._emit = emit

    async def apply(self) -> list[Mend]:
        """Restore what is lost; safe to interrupt. Return what was restored: nothing if everything
        is intact.

        Raises:
            UsageError: The file belongs to another repository.
            WrongPassphrase: The passphrase was not valid when the file was exported.
        """
        keys, config = await self._open()
        if not await is_of(self._backend, keys):
            raise UsageError(
                f"{self._name} is not the recovery file of {self._backend.where}: nothing there verifies under its keys",
                cure="name the repository that it was exported from, or use the file of this one",
            )
        spare = self._recovery.number, self._recovery.key
        mends = await inspect(
            self._backend, keys, config, spare_config=self._recovery.config, spare_key=spare
        )
        await mend(self._backend, mends)
        return mends

    async def _open(self) -> tuple[Keys, Config]:
        recovery = self._recovery
        found = Newest(
            self._name,
            recovery.number,
            recovery.key,
            decode_slots(self._name, recovery.key),
            recovery.number,
        )
        keys = await open_keys(self._backend, found, self._passphrase)
        return keys, decode_config(CONFIG, recovery.config, keys)

"""The public, synchronous `Repository`.

Each subject has a module: `opened` (identity, the list of snapshots), `snapshots` (read, compare,
mark, forget), `maintenance` (collect, check, repair, count), `replication` (replicas and copies),
`keys` (passphrases, recovery files). Methods run the coroutines of `icecore.store` in one
background event loop. They import what few commands need when they are called, because importing
everything takes as long as many a command.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

from icecore.access.passphrase import Passphrase
from icecore.access.places import backend_at
from icecore.access.trust import Client
from icecore.config import Config
from icecore.errors import UsageError
from icecore.events import Sink, discard
from icecore.repository.keys import Keys
from icecore.repository.maintenance import Maintenance
from icecore.repository.opened import lost
from icecore.repository.replication import Replication, backend_with_replicas
from icecore.repository.snapshots import Snapshots
from icecore.store.format.keys import Parameters

__all__ = ["Repository", "lost"]


class Repository(Snapshots, Maintenance, Replication, Keys):
    """An open repository; `open` and `create` make one. A context manager; all methods may be
    called from any thread.

    Every method raises `icecore.errors.StoreError` if the storage fails and
    `icecore.errors.Damaged` if what is read is not what was written.

    Attributes:
        core: The repository of `icecore.store`, which lives in ``loop``.
        loop: The background event loop.
    """

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        *,
        replicas: Sequence[str] = (),
        passphrase: Passphrase | None = None,
        plain: bool = False,
        state: str = "",
        config: Config | None = None,
        rebuild: bool = False,
        emit: Sink = discard,
    ) -> Self:
        """Open the repository at a location.

        Args:
            location: Its directory, or ``s3://BUCKET/PREFIX``.
            replicas: Locations of its replicas, the nearest first. Common objects are read from the
                first that has them; this location precedes all of them unless the list names it. An
                unreachable replica is reported and skipped.
            passphrase: Returns the passphrase of an encrypted repository. None: the file or command
                in ``config``, if any, else ICECORE_PASSPHRASE_FILE, ICECORE_PASSPHRASE_COMMAND,
                ICECORE_PASSPHRASE, or the terminal. If there is one other than from the terminal, a
                plain repository is refused.
            plain: Accept a plain repository nevertheless.
            config: Settings for buckets (sections [s3] and [cache]). None: what
                `icecore.config.loading.load` returns.
            state: Directory that records which repository is at which location, and its newest
                state; another repository or an older state there is an error later. Empty: this
                node's.
            rebuild: Open the repository for `repair` even if its configuration is lost.
            emit: Gets the events of all operations on the repository.

        Raises:
            NotFound: There is no repository.
            WrongPassphrase: It is encrypted, and the passphrase is missing or wrong.
            RepositoryReplaced: This node knows another repository there, or an encrypted one.
            PlainRefused: It is plain, and a passphrase is given.
            RecordDamaged: This node's record of the location is damaged.
            RollbackDetected: It shows an older state than this node has seen; raised by the first
                method that reads the state.
            FormatTooNew: A later version of icecore wrote it.
        """
        backend = backend_with_replicas(os.fspath(location), replicas, config, emit)
        client = Client(state, config)
        return cls._make(
            backend,
            state,
            config,
            lambda: client.open(
                backend, passphrase=passphrase, plain=plain, rebuild=rebuild, emit=emit
            ),
        )

    @classmethod
    def create(
        cls,
        location: str | os.PathLike[str],
        *,
        shard_bytes: int = 64 << 20,
        passphrase: Passphrase | None = None,
        plain: bool = False,
        state: str = "",
        config: Config | None = None,
        emit: Sink = discard,
    ) -> Self:
        """Make a repository at a location. A missing directory is created; a bucket must exist.

        Args:
            shard_bytes: Target size in bytes of the objects that hold chunks: 1 MiB to 1 GiB.
            passphrase: Returns the passphrase of an encrypted repository. None: it is plain.
            plain: Allow a plain repository although this node knows an encrypted one there.
            state, config, emit: As for `open`.

        Raises:
            PlainRefused: This node knows an encrypted repository there.
            UsageError: There already is a repository, or the storage lacks what one requires (hard
                links, conditional writes).
        """
        if not 1 << 20 <= shard_bytes <= 1 << 30:
            raise UsageError(
                f"shards of {shard_bytes} bytes", cure="use 1 MiB to 1 GiB; 64 MiB serves well"
            )
        backend = backend_at(os.fspath(location), create=True, config=config, emit=emit)
        parameters, client = Parameters(shard_bytes), Client(state, config)
        return cls._make(
            backend,
            state,
            config,
            lambda: client.create(
                backend, parameters, passphrase=passphrase, plain=plain, emit=emit
            ),
        )

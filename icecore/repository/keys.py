"""Keys of a repository: passphrases, and recovery files for lost keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from icecore.access.passphrase import Passphrase, current
from icecore.access.places import backend_at
from icecore.config import Config
from icecore.errors import UsageError
from icecore.events import Sink, discard
from icecore.repository.opened import Opened
from icecore.store.runtime.loop import LoopThread

if TYPE_CHECKING:
    from icecore.store.format.slots import Slot, Slots
    from icecore.store.log.identity import Mend


class Keys(Opened):
    """Changes who can open a repository, and exports and imports its keys."""

    def key_slots(self) -> list[Slot]:
        """Return the key slots of an encrypted repository. Each slot opens with its own passphrase.

        Raises:
            UsageError: The repository is not encrypted.
        """
        from icecore.store.format import slots as slot_changes
        from icecore.store.log import keychain

        found = self.loop.run(keychain.newest(self.core.backend))
        if found.slots is None:
            raise UsageError(
                f"{self.location} is not encrypted",
                cure="'icecore init --encrypt' makes an encrypted repository",
            )
        slot_changes.verify(found.name, found.slots, self.core.keys.secret)
        return found.slots.slots

    def add_passphrase(self, label: str, passphrase: bytes) -> list[Slot]:
        """Add a passphrase; return the slots that then exist.

        Raises:
            UsageError: The label is taken, the passphrase is too short, or the repository is not
                encrypted.
        """
        from icecore.store.format import slots as slot_changes

        return self._change_slots(
            lambda slots: slot_changes.add(slots, self.core.keys.secret, passphrase, label)
        )

    def remove_passphrase(self, which: str) -> list[Slot]:
        """Remove a passphrase, given by the label or id of its slot. The data is not encrypted
        again: whoever knew the passphrase may have kept the key that it opens.

        Raises:
            NotFound: There is no such slot.
            UsageError: It is the only slot, or the repository is not encrypted.
        """
        from icecore.store.format import slots as slot_changes

        return self._change_slots(
            lambda slots: slot_changes.remove(slots, self.core.keys.secret, which)
        )

    def change_passphrase(self, which: str, passphrase: bytes) -> list[Slot]:
        """Replace a passphrase, given by the label or id of its slot (empty: the only slot).

        Raises:
            NotFound: There is no such slot.
            UsageError: There are several slots and none is named, the passphrase is too short, or
                the repository is not encrypted.
        """
        from icecore.store.format import slots as slot_changes

        def edit(slots: Slots) -> Slots:
            if not which and len(slots.slots) > 1:
                raise UsageError(
                    f"there are {len(slots.slots)} slots",
                    cure="name one; 'icecore key list' lists them",
                )
            return slot_changes.rotate(
                slots,
                self.core.keys.secret,
                which or slots.slots[0].id,
                passphrase,
            )

        return self._change_slots(edit)

    def _change_slots(self, edit: Callable[[Slots], Slots]) -> list[Slot]:
        from icecore.store.log import keychain

        return self.loop.run(keychain.change(self.core.backend, self.core.keys, edit)).slots

    def recovery_file(self) -> bytes:
        """Return the content of a recovery file, from which `import_keys` restores lost keys or a
        lost configuration.

        The file of a plain repository is a secret. That of an encrypted repository requires one of
        the passphrases that are valid now.
        """
        from icecore.store.log import recovery

        return self.loop.run(recovery.export(self.core))

    @staticmethod
    def import_keys(
        location: str | os.PathLike[str],
        name: str,
        data: bytes,
        *,
        passphrase: Passphrase | None = None,
        config: Config | None = None,
        emit: Sink = discard,
    ) -> list[Mend]:
        """Restore a repository's lost keys and configuration from a recovery file. Intact objects
        stay unchanged.

        Args:
            name, data: The file's name, for messages, and its content.
            location, passphrase, config, emit: As for `open`; the passphrase is one that was valid
                when the file was written.

        Returns:
            What was restored.

        Raises:
            UsageError: The file belongs to another repository.
            Damaged: The file is damaged.
        """
        from icecore.store.log.recovery import Restorer

        backend = backend_at(os.fspath(location), config=config, emit=emit)
        restorer = Restorer(backend, name, data, passphrase or current(config), emit=emit)
        with LoopThread() as loop:
            try:
                return loop.run(restorer.apply())
            finally:
                loop.run(backend.close())

"""The key command: passphrases of encrypted repositories, and recovery files for lost keys."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from icecore import units
from icecore.access import passphrase
from icecore.commands.context import Context
from icecore.commands.parsing import Commands
from icecore.errors import NotFound, UsageError

if TYPE_CHECKING:
    from icecore.store.format.slots import Slot


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "key",
        key,
        "Manage passphrases and recovery files.",
        "icecore key list",
        "icecore key add alice",
        "icecore key export /root/snapshots.recovery",
        more="list, add, remove and rotate change who can open an encrypted repository; rotate replaces a passphrase."
        " They do not encrypt the data again: anyone who knew a passphrase may have kept the key that it opens, and only"
        " 'icecore copy' to a new repository excludes them.\n\n"
        "export writes a recovery file, from which import restores lost keys and a lost configuration. Keep it apart from the"
        " repository. The passphrases that were valid at the export open it; the file of a plain repository is itself a secret.",
    )
    parser.add_argument(
        "action",
        choices=("list", "add", "remove", "rotate", "export", "import"),
        metavar="ACTION",
        help="list, add, remove, rotate, export or import",
    )
    parser.add_argument(
        "slot",
        nargs="?",
        default="",
        metavar="LABEL|FILE",
        help="add: the new label; remove, rotate: the label or id of a passphrase; export, import: the recovery file",
    )
    parser.add_argument(
        "--new-file",
        metavar="FILE",
        default="",
        help="read the new passphrase from this file ('-' is a file name)",
    )
    parser.add_argument(
        "--new-command",
        metavar="COMMAND",
        default="",
        help="take the output of this shell command as the new passphrase",
    )


def new_passphrase(arguments: argparse.Namespace) -> passphrase.Passphrase:
    """Return the source of the new passphrase: options, ICECORE_NEW_PASSPHRASE, or the terminal."""
    return passphrase.new(arguments.new_file, arguments.new_command)


def key(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore key."""
    action, which = arguments.action, arguments.slot
    if action in ("export", "import"):
        if not which:
            raise UsageError(
                "which file?",
                cure="icecore key export FILE" if action == "export" else "icecore key import FILE",
            )
        return (_export if action == "export" else _import)(Path(which), context)
    repository = context.repository()
    if action == "list":
        if which:
            raise UsageError(
                f"'key list' takes no argument, but got {which!r}", cure="leave it out"
            )
        slots = repository.key_slots()
    elif action == "add":
        if not which:
            raise UsageError(
                "the new slot needs a label",
                cure="icecore key add LABEL, for instance a person's or a node's name",
            )
        slots = repository.add_passphrase(which, new_passphrase(arguments)())
    elif action == "remove":
        if not which:
            raise UsageError("which slot?", cure="icecore key remove LABEL")
        slots = repository.remove_passphrase(which)
    else:
        slots = repository.change_passphrase(which, new_passphrase(arguments)())
    _show(slots, context)
    return 0


def _export(path: Path, context: Context) -> int:
    repository = context.repository()
    data = repository.recovery_file()
    try:
        with open(
            os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            ),
            "wb",
        ) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise UsageError(f"{path} exists", cure="name another file, or remove it") from None
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", cure="name another file"
        ) from error
    context.output.result(
        "key.export", {"file": str(path), "encrypted": repository.encrypted}, f"wrote {path}"
    )
    if repository.encrypted:
        context.output.note(
            "the current passphrases open the file even after their removal: keep it apart from the repository"
        )
    else:
        context.output.note(
            "the repository is not encrypted, so this file is its key: keep it secret, and apart from the repository"
        )
    return 0


def _import(path: Path, context: Context) -> int:
    from icecore.repository import Repository
    from icecore.store.log.recovery import LIMIT

    try:
        with open(path, "rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise NotFound(
            f"cannot read {path}: {error.strerror}",
            cure="name the file that 'icecore key export FILE' wrote",
        ) from error
    given = passphrase.current(context.config)
    mends = Repository.import_keys(
        context.location,
        str(path),
        data,
        passphrase=given,
        config=context.config,
        emit=context.output.event,
    )
    for mend in mends:
        context.output.result(
            "key.import",
            {"kind": mend.kind, "object": mend.name, "how": mend.how},
            f"{mend.kind} {mend.name}: {mend.how}",
        )
    if not mends:
        context.output.note(
            "the repository lacks nothing that the file contains: nothing was changed"
        )
    return 0


def _show(slots: list[Slot], context: Context) -> None:
    for slot in slots:
        context.output.result(
            "key.slot",
            {
                "id": slot.id,
                "label": slot.label,
                "created": slot.created_ns / 1e9,
                "memory": slot.memory_kib << 10,
                "passes": slot.passes,
            },
        )
    rows = [
        [
            slot.label,
            slot.id,
            units.moment(slot.created_ns / 1e9),
            units.size(slot.memory_kib << 10),
        ]
        for slot in slots
    ]
    context.output.table(["LABEL", "ID", "SET", "MEMORY"], rows)

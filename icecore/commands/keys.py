"""The key command: who can open an encrypted repository."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from icecore import passphrase, units
from icecore.commands.context import Commands, Context
from icecore.errors import UsageError

if TYPE_CHECKING:
    from icecore.store.slots import Slot


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "key",
        key,
        "List, add, remove or replace the passphrases of an encrypted repository.",
        more="'rotate' puts another passphrase in the place of one. The data is not encrypted anew: whoever has had a passphrase may"
        " have kept what it opens, and only 'icecore copy' to a new repository shuts him out.",
    )
    parser.add_argument("action", choices=("list", "add", "remove", "rotate"))
    parser.add_argument("slot", nargs="?", default="", help="the slot's label or id, for remove and rotate; the new label, for add")
    parser.add_argument("--new-file", metavar="FILE", default="", help="the new passphrase is in this file (- is not stdin)")
    parser.add_argument("--new-command", metavar="COMMAND", default="", help="the new passphrase is what this prints")


def new_passphrase(arguments: argparse.Namespace) -> passphrase.Passphrase:
    """What gives the new passphrase: the options, ICECORE_NEW_PASSPHRASE, or the terminal."""
    return passphrase.new(arguments.new_file, arguments.new_command)


def key(arguments: argparse.Namespace, context: Context) -> int:
    """icecore key."""
    action, which = arguments.action, arguments.slot
    repository = context.repository()
    if action == "list":
        if which:
            raise UsageError(f"'key list' lists all, not {which!r}", cure="leave it out")
        slots = repository.key_slots()
    elif action == "add":
        if not which:
            raise UsageError("the new slot needs a label", cure="icecore key add LABEL, for instance a person's or a node's name")
        slots = repository.add_passphrase(which, new_passphrase(arguments)())
    elif action == "remove":
        if not which:
            raise UsageError("which slot?", cure="icecore key remove LABEL")
        slots = repository.remove_passphrase(which)
    else:
        slots = repository.change_passphrase(which, new_passphrase(arguments)())
    _show(slots, context)
    return 0


def _show(slots: list[Slot], context: Context) -> None:
    for slot in slots:
        context.output.result(
            "key.slot",
            {"id": slot.id, "label": slot.label, "created": slot.created_ns / 1e9, "memory": slot.memory_kib << 10, "passes": slot.passes},
        )
    rows = [[slot.label, slot.id, units.moment(slot.created_ns / 1e9), units.size(slot.memory_kib << 10)] for slot in slots]
    context.output.table(["LABEL", "ID", "SET", "MEMORY"], rows)

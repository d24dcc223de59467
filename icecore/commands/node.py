"""The doctor command: examines this machine."""

from __future__ import annotations

import argparse

from icecore.commands.context import Context
from icecore.commands.parsing import Commands


def add(commands: Commands) -> None:
    """Add the command."""
    commands.add(
        "doctor",
        doctor,
        "Check this machine and the repository.",
        "icecore doctor",
        more="Examines what dumps and restores need. Prints a cure for every shortcoming; exits with status 1 if one is serious.",
    )


def doctor(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore doctor."""
    from icecore.node.doctor import examine

    signs = {"good": "ok", "warning": "warn", "bad": "BAD"}
    bad = False
    for finding in examine(context.config, context.location):
        bad = bad or finding.state == "bad"
        words = f"{signs[finding.state]:<5} {finding.name}: {finding.message}"
        fields = {
            "name": finding.name,
            "state": finding.state,
            "message": finding.message,
            "cure": finding.cure,
        }
        context.output.result("doctor.finding", {**fields}, words)
        if finding.cure:
            context.output.line(f"      cure: {finding.cure}")
    return 1 if bad else 0

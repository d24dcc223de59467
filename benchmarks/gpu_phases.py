"""Phases of dumps and restores beside the floor of what each does; the rule: a phase's bytes and
seconds are those of its own event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import Result
from benchmarks.floors import NAMES

#: Event → what it is called here, the floor, and the field with its bytes.
PHASES = {
    "dump.gpu.checkpoint": ("driver out", "pcie out", "bytes"),
    "dump.gpu.restore": ("driver back", "pcie in", "bytes"),
    "dump.early": ("scan", "memory, huge pages", "bytes"),
    "dump.store": ("store", "tmpfs", "stored"),
    "dump.resident.fingerprint": ("fingerprint", "device", "bytes"),
    "dump.resident.copy": ("copy aside", "device", "bytes"),
    "restore.memory": ("fetch and place", "memory, huge pages", "bytes"),
    "restore.gpu.memory": ("fetch into the file", "memory, huge pages", "bytes"),
    "restore.gpu.restore": ("driver back", "pcie in", "bytes"),
    "restore.resident.memory": ("fetch and place on the GPU", "pcie in", "bytes"),
}
#: With fewer bytes the seconds are of something else.
LEAST_BYTES = 64 << 20
#: Each GPU has its own.
_OF_EACH = ("pcie", "pageable", "device")


@dataclass
class Phases:
    """What the events of dumps and restores said: name of the step → event → (bytes, seconds) of
    each round.
    """

    found: dict[tuple[str, str], list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, step: str, events: Mapping[str, Mapping[str, Any]]) -> None:
        """Note a step's events: name → fields of its end."""
        for event, (_, _, size) in PHASES.items():
            fields = events.get(event, {})
            if int(fields.get(size, 0)) >= LEAST_BYTES:
                self.found.setdefault((step, event), []).append(
                    (int(fields[size]), float(fields["seconds"]))
                )

    def results(
        self, part: str, where: str, floors: Mapping[str, float], gpus: int
    ) -> list[Result]:
        """The floors, and each phase as a share of its own: GB/s by GB/s."""
        results = [
            Result(part, f"{where}: floor, {name}", (rate,), None, "higher", "GB/s", NAMES[name])
            for name, rate in floors.items()
        ]
        for (step, event), rounds in self.found.items():
            what, name, _ = PHASES[event]
            rates = [size / seconds / 1e9 for size, seconds in rounds]
            total = f"{rounds[-1][0] / 1e9:.2f} GB in {rounds[-1][1]:.2f} s, {rates[-1]:.2f} GB/s"
            floor = floors.get(name, 0.0) * (gpus if name.startswith(_OF_EACH) else 1)
            if not floor:
                results.append(
                    Result(
                        part,
                        f"{where}: {step}: {what}",
                        tuple(rates),
                        None,
                        "higher",
                        "GB/s",
                        f"{total}; no floor",
                    )
                )
                continue
            note = f"{total}; {name} {floor:.1f} GB/s"
            shares = tuple(rate / floor for rate in rates)
            results.append(
                Result(part, f"{where}: {step}: {what} / {name}", shares, None, "higher", note=note)
            )
        return results

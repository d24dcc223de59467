"""Manifests that hold nothing but records of `icecore.store.format.contract`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from icecore.dumper.phases.commit import recorded_run
from icecore.host.jobs.namespaces import RunRecord
from icecore.restorer.phases.planning import run_record
from icecore.store.format.contract import encode_records
from icecore.store.format.manifest import Manifest, Namespaces, Requirements, Space


def manifest_with(
    extra: Mapping[str, str],
    *,
    devices: Sequence[Mapping[str, str]] = (),
    spaces: Sequence[Space] = (),
) -> Manifest:
    """Return a manifest with these records."""
    return Manifest(
        1,
        "a" * 32,
        "job",
        "lineage",
        "",
        1,
        "host",
        "writer",
        1,
        [],
        list(spaces),
        [],
        Requirements("x86_64", "6.1", "4.1", devices=[dict(device) for device in devices]),
        Namespaces(),
        [],
        extra=dict(extra),
    )


def through_manifest(record: RunRecord) -> RunRecord:
    """Return what a restore reads of what a dump writes."""
    found = run_record(manifest_with(encode_records(run=recorded_run(record, record.log_start))))
    assert found is not None
    return found

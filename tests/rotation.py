"""Which cases of large matrices the ordinary run takes; ``make torture`` and ``--every-case`` take
all.

A matrix here is one failure at every one of many steps. Each commit runs a part of it, the parts
follow each other from commit to commit, and which part a commit runs depends on nothing else.
"""

from __future__ import annotations

import subprocess
import zlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Test function -> in so many parts.
PARTS = {
    "tests/dumper/test_deaths.py::test_a_dumper_that_is_interrupted": 3,
    "tests/dumper/test_deaths.py::test_a_dumper_that_is_killed": 4,
    "tests/dumper/test_failures.py::test_criu_that_fails": 3,
    "tests/dumper/test_hidden.py::test_the_same_is_recorded_as_if_nothing_were_hidden": 4,
    "tests/dumper/test_window.py::test_a_dumper_that_is_killed_while_memory_is_streamed": 3,
    "tests/gpu/test_dump.py::test_a_call_that_fails": 3,
    "tests/gpu/test_dump.py::test_a_dumper_that_is_killed_or_stopped": 3,
    "tests/gpu/test_dump.py::test_a_window_that_breaks_off": 4,
    "tests/gpu/test_restore.py::test_a_restore_that_fails": 3,
    "tests/gpu/test_restore.py::test_a_restore_that_fails_while_the_driver_waits": 3,
    "tests/gpu/test_workers.py::test_workers_are_dumped_and_restored": 2,
    "tests/cli/test_cures.py::test_the_cure_of_damage_helps": 3,
    "tests/cli/test_foreign_names.py::test_a_hostile_repository_commands_no_terminal": 2,
    "tests/resident/test_dump.py::test_a_dumper_that_is_killed_or_stopped": 4,
    "tests/resident/test_dump.py::test_what_fails_costs_a_snapshot": 4,
    "tests/resident/test_dump.py::test_whoever_dies": 4,
    "tests/resident/test_ranks.py::test_a_lineage": 3,
    "tests/resident/test_restore.py::test_a_restore_that_fails": 4,
    "tests/resident/test_restore.py::test_memory_that_is_still_there": 3,
    "tests/resident/test_run.py::test_a_job_that_crashes": 3,
    "tests/restorer/test_device_file.py::test_a_reader_finds_what_was_written": 3,
    "tests/restorer/test_restore.py::test_a_sink_that_fails_ends_the_restore_and_leaves_nothing": 3,
    "tests/restorer/test_restore.py::test_programs_go_on_and_find_their_data_intact": 3,
    "tests/restorer/test_placers.py::test_programs_go_on_and_find_their_data_intact": 3,
    "tests/roundtrip/test_job_files.py::test_a_restore_that_fails_leaves_all_files_as_they_were": 4,
    "tests/roundtrip/test_job_files.py::"
    "test_a_restore_that_is_killed_leaves_files_all_old_or_all_new": 5,
    "tests/roundtrip/test_programs.py::test_it_goes_on_from_the_last_of_three_snapshots": 3,
    "tests/roundtrip/test_programs.py::test_it_runs_while_its_memory_arrives": 3,
    "tests/store/test_crash.py::test_crash_at_every_call": 4,
    "tests/store/test_crash.py::test_every_call_fails_once": 4,
    "tests/store/test_relog.py::test_a_repair_that_stops_anywhere_can_be_done_again": 3,
    "tests/store/test_repair.py::test_any_one_object_is_damaged": 3,
    "tests/store/test_replication.py::test_crash_at_every_call_of_a_sync": 3,
    "tests/store/test_single_damage.py::test_any_one_object": 3,
    "tests/test_programs_criu.py::test_it_goes_on_where_it_was": 3,
}


@cache
def turn() -> int:
    """Return the number of commits up to this one: each takes the part after its parent's."""
    words = ["git", "-C", str(ROOT), "rev-list", "--count", "--first-parent", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0  # no history: the first part


def is_due(test: str, case: str) -> bool:
    """Return whether a commit runs a case.

    Args:
        test: The test function's id, from the root.
        case: Its parameters, as pytest shows them.
    """
    parts = PARTS.get(test, 1)
    return (zlib.crc32(case.encode()) + turn()) % parts == 0

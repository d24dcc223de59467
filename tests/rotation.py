"""Which cases of large matrices the ordinary run takes, and which tests begin first;
``make torture`` and ``--every-case`` take all cases.

A matrix here is one failure at every one of many steps. Each commit runs a part of it, the parts
follow each other from commit to commit, and which part a commit runs depends on nothing else.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Test function -> in so many parts.
PARTS = {
    "tests/cli/test_beside.py::test_a_restore_that_is_killed_leaves_no_mount_and_no_half_copy": 3,
    "tests/cli/test_beside.py::test_each_choice_is_done_as_asked": 3,
    "tests/cli/test_bucket_regions.py::test_what_was_killed_goes_on_where_it_was": 2,
    "tests/cli/test_cures.py::test_the_cure_of_damage_helps": 3,
    "tests/cli/test_foreign_names.py::test_a_hostile_repository_commands_no_terminal": 2,
    "tests/cli/test_foreign_names.py::test_no_locale_is_an_error": 2,
    "tests/cli/test_snapshots.py::test_an_interrupted_hook_ends_with_all_that_it_started": 3,
    "tests/dumper/test_deaths.py::test_a_dumper_that_is_interrupted": 3,
    "tests/dumper/test_deaths.py::test_a_dumper_that_is_killed": 4,
    "tests/dumper/test_deaths.py::test_a_guard_that_is_killed": 2,
    "tests/dumper/test_dump.py::test_a_parent_that_cannot_be_read": 2,
    "tests/dumper/test_dump.py::test_every_page_is_recorded": 4,
    "tests/dumper/test_early.py::test_most_memory_is_read_while_criu_works": 2,
    "tests/dumper/test_failures.py::test_criu_that_fails": 3,
    "tests/dumper/test_hidden.py::test_the_same_is_recorded_as_if_nothing_were_hidden": 7,
    "tests/dumper/test_window.py::test_a_dumper_that_is_killed_while_memory_is_streamed": 3,
    "tests/dumper/test_window.py::test_a_job_in_namespaces_of_its_own": 2,
    "tests/gpu/test_dump.py::test_a_call_that_fails": 3,
    "tests/gpu/test_dump.py::test_a_dumper_that_is_killed_or_stopped": 3,
    "tests/gpu/test_dump.py::test_a_window_that_breaks_off": 4,
    "tests/gpu/test_restore.py::test_a_lineage_of_two_gpu_processes": 2,
    "tests/gpu/test_restore.py::test_a_restore_that_fails": 3,
    "tests/gpu/test_restore.py::test_a_restore_that_fails_while_the_driver_waits": 3,
    "tests/gpu/test_restore.py::test_a_restorer_that_is_killed": 2,
    "tests/gpu/test_workers.py::test_workers_are_dumped_and_restored": 2,
    "tests/host/test_namespaces.py::test_after_a_kill_and_again_from_the_restored_one": 2,
    "tests/resident/test_dump.py::test_a_dumper_that_is_killed_or_stopped": 4,
    "tests/resident/test_dump.py::test_a_look_that_fails_costs_no_snapshot": 2,
    "tests/resident/test_dump.py::test_a_process_that_ends_is_said_to_have_ended": 3,
    "tests/resident/test_dump.py::test_a_worker_that_does_not_let_go_is_ended": 2,
    "tests/resident/test_dump.py::test_memory_is_resident_only_where_an_agent_listens": 2,
    "tests/resident/test_dump.py::test_staging": 2,
    "tests/resident/test_dump.py::test_three_snapshots": 2,
    "tests/resident/test_dump.py::test_what_changes_unforeseen_finds_room": 2,
    "tests/resident/test_dump.py::test_what_fails_costs_a_snapshot": 4,
    "tests/resident/test_dump.py::test_who_dies_while_a_stopped_job_is_stored": 2,
    "tests/resident/test_dump.py::test_whoever_dies": 6,
    "tests/resident/test_keeping.py::test_killed_and_brought_back": 2,
    "tests/resident/test_keeping.py::test_ranks_that_have_each_others_memory": 2,
    "tests/resident/test_keeping.py::test_what_other_processes_of_the_lineage_left": 2,
    "tests/resident/test_precopy.py::test_a_worker_that_fails": 2,
    "tests/resident/test_ranks.py::test_a_lineage": 3,
    "tests/resident/test_restore.py::test_a_restore_that_fails": 4,
    "tests/resident/test_restore.py::test_memory_that_is_still_there": 3,
    "tests/resident/test_run.py::test_a_job_that_crashes": 3,
    "tests/restorer/test_device_file.py::test_a_reader_finds_what_was_written": 3,
    "tests/restorer/test_exchange.py::"
    "test_what_comes_out_is_what_went_in_and_plain_criu_restores_it": 2,
    "tests/restorer/test_placers.py::test_damage_is_named_and_nothing_runs_on": 2,
    "tests/restorer/test_placers.py::test_every_page_comes_back": 2,
    "tests/restorer/test_placers.py::test_placers_that_are_killed": 2,
    "tests/restorer/test_placers.py::test_programs_go_on_and_find_their_data_intact": 3,
    "tests/restorer/test_restore.py::test_a_sink_that_fails_ends_the_restore_and_leaves_nothing": 3,
    "tests/restorer/test_restore.py::test_programs_go_on_and_find_their_data_intact": 3,
    "tests/roundtrip/test_beside.py::"
    "test_an_instance_with_copies_is_dumped_and_restored_to_them": 2,
    "tests/roundtrip/test_instances.py::test_two_instances_of_one_snapshot_beside_the_original": 4,
    "tests/roundtrip/test_job_files.py::"
    "test_a_restore_that_fails_after_the_hand_over_and_before_the_job_runs_loses_no_file": 2,
    "tests/roundtrip/test_job_files.py::test_a_restore_that_fails_leaves_all_files_as_they_were": 4,
    "tests/roundtrip/test_job_files.py::"
    "test_a_restore_that_is_killed_leaves_files_all_old_or_all_new": 5,
    "tests/roundtrip/test_programs.py::test_a_streamed_dump_is_the_same_snapshot": 3,
    "tests/roundtrip/test_programs.py::test_it_goes_on_from_the_last_of_three_snapshots": 5,
    "tests/roundtrip/test_programs.py::test_it_runs_while_its_memory_arrives": 3,
    "tests/roundtrip/test_unix_clients.py::"
    "test_clients_outside_notice_nothing_and_the_restored_server_serves_new_ones": 2,
    "tests/roundtrip/test_users.py::test_a_job_of_another_user_comes_back_as_that_user": 2,
    "tests/service/api/test_routes.py::test_malformed_requests": 3,
    "tests/service/api/test_schema.py::test_the_service_does_what_its_document_says": 3,
    "tests/store/test_crash.py::test_crash_at_every_call": 6,
    "tests/store/test_crash.py::test_every_call_fails_once": 6,
    "tests/store/test_crash.py::test_the_disk_is_full_from_some_call_on": 3,
    "tests/store/test_foreign.py::test_what_is_planted_is_skipped_and_told_of": 3,
    "tests/store/test_gc_model.py::test_nothing_that_is_reached_is_ever_gone": 3,
    "tests/store/test_relog.py::test_a_repair_that_stops_anywhere_can_be_done_again": 3,
    "tests/store/test_relog.py::test_older_entries_are_lost": 2,
    "tests/store/test_repair.py::test_any_one_object_is_damaged": 3,
    "tests/store/test_replication.py::test_crash_at_every_call_of_a_sync": 3,
    "tests/store/test_single_damage.py::test_any_one_object": 3,
    "tests/store/test_transfer.py::test_crash_at_every_call_of_a_copy": 2,
    "tests/test_programs.py::test_it_works_and_passes_its_own_checks": 3,
    "tests/test_programs.py::test_one_changed_bit_is_noticed": 3,
    "tests/test_programs_criu.py::test_it_goes_on_where_it_was": 3,
}

#: Test functions that take longest, in seconds or in one piece. Begun last, one of them would keep
#: a worker busy when all others have nothing left.
LONG = [
    "tests/service/test_slurm.py::test_preempted_jobs_go_on_on_another_node",
    "tests/cli/test_fenced.py::test_examples_run",
    "tests/cli/test_demo.py::test_the_demo",
    "tests/store/test_hostile.py::test_what_a_holder_of_the_key_wrote",
    "tests/service/test_supervised.py::"
    "test_a_job_that_fails_from_one_snapshot_is_brought_back_from_an_older_one",
    "tests/store/test_hostile.py::test_sealed_mutations_of_every_object",
    "tests/resident/test_run.py::test_a_job_and_its_instances",
    "tests/store/test_processes.py::test_processes_are_killed_at_random",
    "tests/service/test_supervised.py::test_one_instance_of_a_name",
    "tests/store/test_gc_model.py::test_nothing_that_is_reached_is_ever_gone",
    "tests/service/test_supervised.py::test_a_crash_is_restored_and_a_crash_loop_is_not_for_ever",
    "tests/cli/test_bucket.py::"
    "test_a_store_that_fails_half_its_requests_is_slower_and_nothing_else",
    "tests/cli/test_bucket_regions.py::test_what_was_killed_goes_on_where_it_was",
    "tests/store/test_fuzz.py::test_mutated_objects",
    "tests/service/test_supervised.py::test_preempted_while_a_periodic_snapshot_is_taken",
    "tests/cli/test_foreign_names.py::test_a_hostile_repository_commands_no_terminal",
    "tests/resident/test_run.py::test_ranks",
    "tests/cli/test_regions.py::test_a_job_is_restored_in_another_region",
    "tests/gpu/test_restore.py::test_a_lineage_of_two_gpu_processes",
    "tests/resident/test_precopy.py::test_what_is_at_rest",
]


def ordered(tests: Sequence[str], workers: int) -> list[int]:
    """Return the positions of tests in the order in which they run.

    pytest-xdist gives each worker a piece of equal length and lets idle workers steal from the end
    of others'. So each piece begins with its share of the long tests; all others keep their order.

    Args:
        tests: Ids of test functions, one for each case.
        workers: How many there are.
    """
    rank = {test: number for number, test in enumerate(LONG)}
    long = sorted(
        (at for at, test in enumerate(tests) if test in rank), key=lambda at: rank[tests[at]]
    )
    rest = iter([at for at, test in enumerate(tests) if test not in rank])
    found: list[int] = []
    for number in range(workers):
        size = (len(tests) - len(found)) // (workers - number)
        first = long[number::workers]
        found += first + list(islice(rest, max(0, size - len(first))))
    return found + list(rest)


@cache
def turn() -> int:
    """Return the number of commits up to this one: each takes the part after its parent's."""
    words = ["git", "-C", str(ROOT), "rev-list", "--count", "--first-parent", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0  # no history: the first part


def is_due(test: str, number: int) -> bool:
    """Return whether a commit runs a case.

    Args:
        test: The test function's id, from the root.
        number: Of the case among those of its function, in their order.
    """
    return (number + turn()) % PARTS.get(test, 1) == 0

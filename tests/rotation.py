"""Which cases of large matrices the ordinary run takes, and which tests begin first;
``make torture`` and ``--every-case`` take all cases.

A matrix here is one mechanism with many values: a failure at every one of many steps, the kinds of
damage to an object, the modes of a restore, the versions of CRIU, the programs of the tests. Its
cases lead through the same code of the test and nearly the same of the product, and all have passed
for long; a case that finds something leaves the matrix, or the matrix leaves this table. Each
commit runs a part of it, and at least one case. The parts follow each other from commit to commit;
which part a commit runs depends on nothing else.

Where the job outlives each case, one test runs the cases in turn on one job (`tests.moments`).
`MOMENTS` says in how many parts these are.
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
    "tests/cli/test_cures.py::test_the_cure_of_damage_helps": 5,
    "tests/cli/test_foreign_names.py::test_a_hostile_repository_commands_no_terminal": 2,
    "tests/cli/test_foreign_names.py::test_no_locale_is_an_error": 3,
    "tests/cli/test_foreign_names.py::test_places_that_criu_works_in": 2,
    "tests/cli/test_foreign_names.py::test_snapshots_of_foreign_names": 2,
    "tests/cli/test_ports.py::test_closed_connections_of_a_killed_job_do_not_delay_its_restore": 2,
    "tests/cli/test_private.py::test_state_is_private_whatever_the_umask": 2,
    "tests/cli/test_snapshots.py::test_an_interrupted_hook_ends_with_all_that_it_started": 5,
    "tests/dumper/test_dump.py::test_a_parent_that_cannot_be_read": 4,
    "tests/dumper/test_dump.py::"
    "test_a_stopped_tree_stands_still_until_its_snapshot_is_committed": 2,
    "tests/dumper/test_dump.py::test_every_page_is_recorded": 6,
    "tests/dumper/test_dump.py::test_files_that_were_mapped_between_dumps": 2,
    "tests/dumper/test_dump.py::test_of_a_cell_with_one_changed_page_that_page_is_stored": 2,
    "tests/dumper/test_early.py::test_most_memory_is_read_while_criu_works": 2,
    "tests/dumper/test_hidden.py::test_a_random_layout": 4,
    "tests/dumper/test_hidden.py::test_the_same_is_recorded_as_if_nothing_were_hidden": 10,
    "tests/dumper/test_in_place.py::test_any_other_bus_error_is_treated_as_before": 3,
    "tests/dumper/test_open_files.py::test_what_changes_after_it_was_stored": 4,
    "tests/dumper/test_preflight.py::test_what_is_not_refused_can_be_dumped": 3,
    "tests/dumper/test_scan.py::test_a_scan_finds_what_is_there": 3,
    "tests/dumper/test_window.py::test_a_job_in_namespaces_of_its_own": 2,
    "tests/dumper/test_window.py::test_every_criu_that_is_installed": 2,
    "tests/gpu/test_dump.py::test_a_dumper_that_is_killed_or_stopped": 2,
    "tests/gpu/test_dump.py::test_a_window_that_breaks_off": 5,
    "tests/gpu/test_dump.py::test_the_driver_does_not_wait_for_the_end_of_criu": 2,
    "tests/gpu/test_dump.py::test_the_drivers_mapping_is_made_for_it": 2,
    "tests/gpu/test_helper.py::test_what_was_locked_runs_again": 2,
    "tests/gpu/test_holder.py::test_nothing_runs_of_a_restore_whose_helper_dies": 2,
    "tests/gpu/test_holder.py::test_threads_that_use_memory_of_the_driver": 2,
    "tests/gpu/test_restore.py::test_a_driver_that_overtakes_the_fetching_waits": 2,
    "tests/gpu/test_restore.py::test_a_lineage_of_two_gpu_processes": 4,
    "tests/gpu/test_restore.py::test_a_restore_that_fails": 6,
    "tests/gpu/test_restore.py::test_a_restore_that_fails_while_the_driver_waits": 5,
    "tests/gpu/test_restore.py::test_a_restorer_that_is_killed": 4,
    "tests/gpu/test_restore.py::test_device_memory_in_a_file": 2,
    "tests/gpu/test_restore.py::test_every_criu_maps_the_file": 2,
    "tests/gpu/test_restore.py::test_the_drivers_time_begins_when_its_memory_is_there": 2,
    "tests/gpu/test_restore.py::test_whether_all_device_memory_is_there": 2,
    "tests/gpu/test_workers.py::test_a_process_that_begins_to_use_cuda_meanwhile": 2,
    "tests/gpu/test_workers.py::test_a_process_without_a_context": 2,
    "tests/gpu/test_workers.py::test_workers_are_dumped_and_restored": 4,
    "tests/host/test_criu.py::test_a_lazy_restore_goes_on_with_every_byte": 2,
    "tests/host/test_criu_memcpy.py::test_the_same_bytes": 3,
    "tests/host/test_namespaces.py::test_after_a_kill_and_again_from_the_restored_one": 2,
    "tests/host/test_namespaces.py::test_two_instances_beside_the_original": 2,
    "tests/host/test_run.py::test_exit_status": 3,
    "tests/resident/test_ahead.py::test_what_is_freed_can_be_had_again": 2,
    "tests/resident/test_allocation.py::test_allocation_in_a_stream_capture_is_as_without": 3,
    "tests/resident/test_copies.py::test_a_job_with_memory_that_the_driver_moves": 2,
    "tests/resident/test_copies.py::test_a_window_that_fails_leaves_no_thread": 3,
    "tests/resident/test_dump.py::test_a_dumper_that_is_killed_or_stopped": 2,
    "tests/resident/test_dump.py::test_a_look_that_fails_costs_no_snapshot": 2,
    "tests/resident/test_dump.py::test_a_process_that_ends_is_said_to_have_ended": 6,
    "tests/resident/test_dump.py::test_memory_is_resident_only_where_an_agent_listens": 2,
    "tests/resident/test_dump.py::test_memory_that_comes_after_the_look": 2,
    "tests/resident/test_dump.py::test_staging": 2,
    "tests/resident/test_dump.py::test_three_snapshots": 2,
    "tests/resident/test_dump.py::test_what_changes_unforeseen_finds_room": 2,
    "tests/resident/test_dump.py::test_what_is_freed_while_the_dump_stores_is_free": 2,
    "tests/resident/test_dump.py::test_who_dies_while_a_stopped_job_is_stored": 2,
    "tests/resident/test_dump.py::test_whoever_dies": 5,
    "tests/resident/test_keeping.py::test_killed_and_brought_back": 2,
    "tests/resident/test_keeping.py::test_ranks_that_have_each_others_memory": 2,
    "tests/resident/test_keeping.py::test_what_other_processes_of_the_lineage_left": 2,
    "tests/resident/test_parking.py::"
    "test_only_threads_that_move_are_waited_for_to_leave_the_driver": 2,
    "tests/resident/test_precopy.py::test_a_worker_that_fails": 4,
    "tests/resident/test_precopy.py::test_what_is_at_rest": 2,
    "tests/resident/test_precopy.py::test_where_it_is_not_worth_it": 2,
    "tests/resident/test_ranks.py::test_a_lineage": 3,
    "tests/resident/test_ranks.py::test_memory_that_is_still_there": 3,
    "tests/resident/test_ranks.py::test_on_the_other_ones_gpu": 2,
    "tests/resident/test_recycling.py::test_a_loop_asks_neither_driver_nor_keeper": 2,
    "tests/resident/test_restore.py::test_a_lineage": 2,
    "tests/resident/test_restore.py::test_a_restore_that_fails": 6,
    "tests/resident/test_restore.py::test_digests": 2,
    "tests/resident/test_restore.py::test_memory_that_is_still_there": 3,
    "tests/resident/test_restore.py::"
    "test_no_lease_ends_before_what_is_still_there_is_what_it_was": 2,
    "tests/resident/test_restore.py::test_placers_that_are_killed": 2,
    "tests/resident/test_run.py::test_a_job_and_its_instances": 2,
    "tests/resident/test_run.py::test_a_job_that_crashes": 2,
    "tests/resident/test_run.py::test_what_cannot_be_started_leaves_no_keeper": 2,
    "tests/restorer/test_daemon.py::test_zero_pages_that_are_placed_ahead_cause_no_page_faults": 3,
    "tests/restorer/test_device_file.py::test_a_reader_finds_what_was_written": 5,
    "tests/restorer/test_exchange.py::"
    "test_what_comes_out_is_what_went_in_and_plain_criu_restores_it": 2,
    "tests/restorer/test_fetch.py::test_a_fault_jumps_a_long_queue": 2,
    "tests/restorer/test_placers.py::test_damage_is_named_and_nothing_runs_on": 6,
    "tests/restorer/test_placers.py::test_every_page_comes_back": 2,
    "tests/restorer/test_placers.py::test_placers_that_are_killed": 4,
    "tests/restorer/test_placers.py::test_programs_go_on_and_find_their_data_intact": 5,
    "tests/restorer/test_put_back.py::test_whatever_step_is_the_last_one_all_is_old_or_all_new": 2,
    "tests/restorer/test_restore.py::test_a_damaged_shard_is_named_and_nothing_runs_on": 3,
    "tests/restorer/test_restore.py::test_a_restorer_that_is_killed_takes_the_tree_with_it": 2,
    "tests/restorer/test_restore.py::test_a_sink_that_fails_ends_the_restore_and_leaves_nothing": 5,
    "tests/restorer/test_restore.py::"
    "test_a_sink_that_fails_once_the_tree_lives_by_itself_changes_nothing": 2,
    "tests/restorer/test_restore.py::test_an_id_that_another_process_gets_meanwhile": 2,
    "tests/restorer/test_restore.py::"
    "test_breaking_off_when_the_tree_lives_by_itself_is_no_failure_of_its_restore": 3,
    "tests/restorer/test_restore.py::test_every_page_comes_back": 2,
    "tests/restorer/test_restore.py::test_programs_go_on_and_find_their_data_intact": 5,
    "tests/restorer/test_restore.py::test_what_criu_copies_is_known_before": 2,
    "tests/roundtrip/test_beside.py::test_an_instance_with_copies_beside_the_original": 2,
    "tests/roundtrip/test_beside.py::"
    "test_an_instance_with_copies_is_dumped_and_restored_to_them": 4,
    "tests/roundtrip/test_instances.py::test_two_instances_of_one_snapshot_beside_the_original": 6,
    "tests/roundtrip/test_job_files.py::"
    "test_a_file_that_is_swapped_before_criu_opens_it_is_not_given_to_the_job": 3,
    "tests/roundtrip/test_job_files.py::test_a_job_that_runs_has_its_old_files": 2,
    "tests/roundtrip/test_job_files.py::"
    "test_a_restore_that_fails_after_the_hand_over_and_before_the_job_runs_loses_no_file": 4,
    "tests/roundtrip/test_job_files.py::test_a_restore_that_fails_leaves_all_files_as_they_were": 6,
    "tests/roundtrip/test_job_files.py::"
    "test_a_restore_that_is_killed_leaves_files_all_old_or_all_new": 8,
    "tests/roundtrip/test_links_of_users.py::"
    "test_a_socket_is_not_named_through_a_link_of_the_user": 3,
    "tests/roundtrip/test_links_of_users.py::"
    "test_what_has_no_name_is_not_made_through_a_link_of_the_user": 2,
    "tests/roundtrip/test_lost_names.py::test_files_whose_name_another_file_has": 2,
    "tests/roundtrip/test_private_tmp.py::test_a_private_tmp_travels_with_its_job": 2,
    "tests/roundtrip/test_programs.py::test_a_streamed_dump_is_the_same_snapshot": 3,
    "tests/roundtrip/test_programs.py::"
    "test_it_forks_moves_and_discards_memory_while_that_arrives": 3,
    "tests/roundtrip/test_programs.py::test_it_goes_on_from_the_last_of_three_snapshots": 8,
    "tests/roundtrip/test_programs.py::test_it_runs_while_its_memory_arrives": 5,
    "tests/roundtrip/test_reservations.py::test_reserved_terabytes": 3,
    "tests/roundtrip/test_restless.py::test_a_tree_that_forks_all_the_time": 2,
    "tests/roundtrip/test_shared_memory.py::test_a_job_with_a_root_of_its_own": 2,
    "tests/roundtrip/test_software.py::test_software": 4,
    "tests/roundtrip/test_surroundings.py::"
    "test_a_restore_that_fails_leaves_nothing_that_it_made": 3,
    "tests/roundtrip/test_surroundings.py::test_what_exists_is_not_changed": 2,
    "tests/roundtrip/test_surroundings.py::"
    "test_what_is_swapped_before_criu_opens_it_is_not_given_to_the_job": 3,
    "tests/roundtrip/test_swapped_files.py::"
    "test_a_file_that_is_swapped_for_a_link_is_not_given_to_the_job": 2,
    "tests/roundtrip/test_swapped_files.py::test_what_criu_makes_itself_is_no_other_file": 2,
    "tests/roundtrip/test_unix_clients.py::"
    "test_clients_outside_notice_nothing_and_the_restored_server_serves_new_ones": 2,
    "tests/roundtrip/test_users.py::test_a_job_of_another_user_comes_back_as_that_user": 4,
    "tests/roundtrip/test_users.py::test_links_that_are_swapped_while_a_job_starts_lead_nowhere": 2,
    "tests/service/api/test_routes.py::test_malformed_requests": 3,
    "tests/service/api/test_schema.py::test_the_service_does_what_its_document_says": 6,
    "tests/service/api/test_streams.py::test_a_stream_ends_with_its_token": 3,
    "tests/service/test_supervised.py::test_a_job_that_ends_while_it_is_being_stopped": 4,
    "tests/service/test_supervised.py::test_a_reader_that_does_not_read_delays_nothing": 2,
    "tests/service/test_supervised.py::test_preempted_and_brought_back": 2,
    "tests/service/test_supervised.py::test_the_watchdog_stops_and_ends_a_job_without_a_lease": 2,
    "tests/service/test_supervised.py::test_what_the_user_ends_is_not_brought_back": 3,
    "tests/service/test_unreachable.py::"
    "test_a_job_is_resumed_once_the_repository_can_be_reached": 3,
    "tests/service/test_unreachable.py::test_a_signal_ends_the_wait_for_the_repository": 2,
    "tests/store/test_check.py::test_every_object_is_looked_at": 2,
    "tests/store/test_compaction.py::test_deltas_survive_their_shards": 2,
    "tests/store/test_crash.py::test_crash_at_every_call": 10,
    "tests/store/test_crash.py::test_every_call_fails_once": 10,
    "tests/store/test_crash.py::test_the_disk_is_full_from_some_call_on": 5,
    "tests/store/test_encryption.py::test_no_harmed_object_is_believed": 2,
    "tests/store/test_foreign.py::test_what_is_planted_is_skipped_and_told_of": 6,
    "tests/store/test_fuzz.py::test_mutated_objects": 2,
    "tests/store/test_gc_model.py::test_nothing_that_is_reached_is_ever_gone": 3,
    "tests/store/test_hostile.py::test_sealed_mutations_of_every_object": 3,
    "tests/store/test_hostile.py::test_what_a_holder_of_the_key_wrote": 4,
    "tests/store/test_index.py::test_lookups_through_many_segments": 2,
    "tests/store/test_log.py::test_a_fork_is_noticed_whatever_entries_are_withheld": 3,
    "tests/store/test_log.py::test_trimming_in_any_order_misleads_no_sleeper": 4,
    "tests/store/test_parsers.py::test_random_bytes_are_named": 2,
    "tests/store/test_parsers.py::test_sealed_nonsense_is_named": 2,
    "tests/store/test_processes.py::test_processes_are_killed_at_random": 2,
    "tests/store/test_relog.py::test_a_name_planted_far_beyond_the_log_bricks_nothing": 3,
    "tests/store/test_relog.py::test_a_repair_that_stops_anywhere_can_be_done_again": 3,
    "tests/store/test_relog.py::test_older_entries_are_lost": 4,
    "tests/store/test_relog.py::test_the_newest_entries_are_damaged": 4,
    "tests/store/test_repair.py::test_any_one_object_is_damaged": 6,
    "tests/store/test_replication.py::test_crash_at_every_call_of_a_sync": 3,
    "tests/store/test_replication.py::test_repair_brings_back_what_a_replica_has": 2,
    "tests/store/test_replication.py::test_single_failures_of_a_sync": 2,
    "tests/store/test_s3.py::test_replies": 3,
    "tests/store/test_s3.py::test_wrong_credentials_and_missing_buckets": 3,
    "tests/store/test_single_damage.py::"
    "test_a_repository_of_an_earlier_version_gets_its_second_copies": 4,
    "tests/store/test_single_damage.py::test_any_one_object": 6,
    "tests/store/test_transfer.py::test_a_lineage_is_copied_with_its_deltas": 2,
    "tests/store/test_transfer.py::test_crash_at_every_call_of_a_copy": 4,
    "tests/store/test_writer.py::test_an_unreachable_store_at_commit": 2,
    "tests/test_programs.py::test_it_works_and_passes_its_own_checks": 5,
    "tests/test_programs.py::test_one_changed_bit_is_noticed": 5,
    "tests/test_programs_criu.py::test_it_goes_on_where_it_was": 5,
}

#: Test function -> in how many parts are the moments that it runs on one job. They move on once all
#: parts of its cases (`PARTS`) have had their turn.
MOMENTS = {
    "tests/dumper/test_deaths.py::test_a_dumper_that_is_interrupted": 5,
    "tests/dumper/test_deaths.py::test_a_dumper_that_is_killed": 6,
    "tests/dumper/test_deaths.py::test_a_guard_that_is_killed": 2,
    "tests/dumper/test_failures.py::test_a_window_that_is_over_before_criu_serves": 2,
    "tests/dumper/test_failures.py::test_criu_or_its_script_killed_while_it_waits": 2,
    "tests/dumper/test_failures.py::test_criu_that_fails": 4,
    "tests/dumper/test_window.py::test_a_dumper_that_is_killed_while_memory_is_streamed": 3,
    "tests/dumper/test_window.py::test_criu_or_the_guard_killed_in_a_streamed_window": 2,
    "tests/gpu/test_dump.py::test_a_call_that_fails": 6,
    "tests/gpu/test_dump.py::test_a_dumper_that_is_killed_or_stopped": 3,
    "tests/gpu/test_dump.py::test_a_store_that_fails": 2,
    "tests/gpu/test_dump.py::test_a_window_that_breaks_off": 2,
    "tests/resident/test_dump.py::test_a_dumper_that_is_killed_or_stopped": 3,
    "tests/resident/test_dump.py::test_a_store_that_fails": 2,
    "tests/resident/test_dump.py::test_a_worker_that_does_not_let_go_is_ended": 2,
    "tests/resident/test_dump.py::test_what_fails_costs_a_snapshot": 8,
    "tests/resident/test_dump.py::test_whoever_dies": 2,
    "tests/resident/test_ranks.py::test_what_fails_costs_a_snapshot": 3,
}

#: Test functions that take longest, in seconds or in one piece. Begun last, one of them would keep
#: a worker busy when all others have nothing left.
LONG = [
    "tests/cli/test_demo.py::test_the_demo",
    "tests/service/test_local_cluster.py::test_a_job_moves_to_the_other_region",
    "tests/service/test_slurm.py::test_preempted_jobs_go_on_on_another_node",
    "tests/roundtrip/test_software.py::test_software",
    "tests/cli/test_fenced.py::test_examples_run",
    "tests/restorer/test_put_back.py::test_whatever_step_is_the_last_one_all_is_old_or_all_new",
    "tests/store/test_crash.py::test_crash_at_every_call",
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


def is_due(test: str, number: int, cases: int) -> bool:
    """Return whether a commit runs a case.

    Args:
        test: The test function's id, from the root.
        number: Of the case among those of its function, in their order.
        cases: How many its function has; there are no more parts, so that one case always runs.
    """
    return _has_turn(turn(), PARTS.get(test, 1), number, cases)


def is_moment_due(test: str, number: int, moments: int) -> bool:
    """Return whether a commit runs a moment; see `is_due`."""
    return _has_turn(turn() // PARTS.get(test, 1), MOMENTS.get(test, 1), number, moments)


def _has_turn(turns: int, parts: int, number: int, count: int) -> bool:
    return (number + turns) % min(parts, count) == 0

"""Supervised jobs: scheduled snapshots, preemption, restarts.

Reading order: `interval` (how often), `record` (what was measured of a job), `notice` (what says
that a job has to leave), `supervisor` (the loop that does it), `watchdog` (what ends a job whose
supervisor was killed).
"""

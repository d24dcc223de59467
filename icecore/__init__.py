"""Transparent incremental snapshots of running process trees."""

"""Threads and event loops that the store runs on."""

"""Filling memory: page faults, and device memory through a file."""

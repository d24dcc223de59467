"""Tests of the restorer: pure parts against models, the rest with real processes and the real CRIU."""

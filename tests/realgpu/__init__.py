"""Tests on real NVIDIA GPUs: `make test-gpu`, or `tools/test-gpu` by itself; nothing here runs
where there is none.
"""

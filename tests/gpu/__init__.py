"""Tests of device memory: with a fake driver everywhere, with real GPUs where there are some (`make
test-gpu`).
"""

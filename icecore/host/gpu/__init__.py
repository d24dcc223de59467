"""Processes that make CUDA calls for others."""

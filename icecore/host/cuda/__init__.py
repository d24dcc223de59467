"""Checkpointing of device memory and what is known of the GPUs: one interface, a back end for each
way to have it.
"""

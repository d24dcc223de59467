"""icecore: transparent snapshots of running process trees, kept incrementally, restored fast; the rest loads on first use."""

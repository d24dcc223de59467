"""The threads, event loops and buffers that the store runs on: `loop`, `parallel`, `pool`."""

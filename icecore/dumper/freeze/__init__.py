"""The window: CRIU started ahead, the tree frozen, and the guard that thaws it whatever happens."""

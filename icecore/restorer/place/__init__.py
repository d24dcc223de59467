"""Processes that put memory in place, outside the interpreter that restores."""

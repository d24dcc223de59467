"""The commands, one module per group.

Each module adds its parsers at start-up and imports what a command needs when the command runs.
"""

"""The commands, a module for each group; each adds its parsers and is loaded in full only for what
it needs.
"""

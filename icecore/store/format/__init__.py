"""The bytes of a repository: what is stored, and how values become objects and come back; no input
or output.
"""

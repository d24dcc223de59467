"""A job's files: written beside, exchanged, undone."""

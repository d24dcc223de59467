"""Snapshots as people see them: their names, their contents, and the differences of two. Without
access to a repository.
"""

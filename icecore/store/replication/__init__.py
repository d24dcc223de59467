"""Snapshots brought from one repository to another."""

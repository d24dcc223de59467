"""Tests of icecore; a package, so that test modules and the programs they run can be imported by
name.
"""

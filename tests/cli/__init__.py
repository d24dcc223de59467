"""Tests of the public face: configuration, command line, events, and real jobs through it."""

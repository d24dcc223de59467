"""Tests of configuration, the command line, events, and real jobs through them."""

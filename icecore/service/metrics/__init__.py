"""Metrics in the text format of Prometheus.

Reading order: `families` (names, types, help), `tally` (what any process of this node did, added up
in a file), `exposition` (the answer to a scrape).
"""

"""Metrics in the text format of Prometheus.

Reading order: `families` (names, types, help), `tally` (the counters of all processes of this
node, in a file), `exposition` (the answer to a scrape).
"""

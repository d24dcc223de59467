"""Facts about the jobs of a repository and of this node, for metrics and page.

Reading order: `readings` (what is read, and how long it stays valid), `jobs` (facts about each job,
derived from the readings; pure).
"""

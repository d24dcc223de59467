"""What is known of the jobs of a repository and of this node, for metrics and page.

Reading order: `readings` (what is read, and how long it stays valid), `jobs` (what follows from it
for each job; pure).
"""

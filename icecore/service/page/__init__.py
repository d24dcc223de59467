"""The web page of the service: rendered on the server, with a strict content security policy, and
without requests to other hosts.

Reading order: `sessions` (sign-in), `render` (templates and headers), `facts` (what the
views show), `lineage` (the tree of snapshots), `views` and `actions` (handlers), `routes`.
"""

"""The web page of the service: made on the server, with a strict content security policy, and no
need of any other host.

Reading order: `sessions` (who has signed in), `render` (templates and headers), `facts` (what the
views show), `lineage` (the tree of snapshots), `views` and `actions` (handlers), `routes`.
"""

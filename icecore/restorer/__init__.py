"""Restores snapshots; no process ever runs on a missing page.

In reading order: `restore` is the table of contents, and `phases` its chapters. `options`,
`requirements` and `restored` are what goes in, what is checked, and what comes out. `plan` decides
which cells go where, `fetch` reads them from the store, `place` puts them into processes, and
`fill` keeps the memory of a tree that is being filled. `files` puts the job's files back and
rebuilds CRIU's images, `gpu` brings device memory back, `guard` kills an incomplete tree if the
restorer dies, `tree` starts and ends the tree, and `workingset` remembers which memory it used
first.
"""

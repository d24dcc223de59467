"""The phases of one restore, each of which takes the values of those before it.

In the order in which `icecore.restorer.restore` runs them: `planning` opens the snapshot and checks
the machine, `resources` starts what works beside CRIU, `files` writes the job's files and CRIU's
images, `building` has CRIU build the tree, `loading` fills its memory, `releasing` lets it run.
`attempt` holds what the caller wants, `undoing` what happens if a phase fails.
"""

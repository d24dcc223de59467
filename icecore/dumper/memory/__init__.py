"""Read the memory of a tree, find what changed, and store it.

Which cells there are:

- `present`: a process's private memory and the pages that hold something.
- `shared`: shared memory that is no file.
- `images`: what CRIU wrote about memory.
- `hidden`: pages that CRIU was kept from seeing.
- `allocations`, `cells`, `grid`: how memory is cut into cells.

What is known of them:

- `known`: fingerprints and records by address.
- `parent`: the snapshot to build on.
- `forked`: what pre-copy learnt of a new process's parent.

How they are read and stored:

- `staging`: bounded memory for cells between reading and storing.
- `sources`: files and page images, addressed like memory.
- `scan`: threads that read, fingerprint and hand on.
- `pipeline`: threads that store.
- `spaces`: one address space, file or image on its way into the repository.
- `precopy`: private memory, stored while the job runs.
- `background`: threads of low priority, for what is done while the job runs.
- `early`: memory that is read while CRIU is still at work.
- `plain`: the pages of a dump that CRIU wrote in full.
"""

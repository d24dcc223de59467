"""Looking at a running tree: processes, files, sockets, GPUs."""

"""CRIU: how it is found and run, and its image files.

- `program`: finds CRIU, builds its command lines; `log`: explains why it failed
- `libraries`: what CRIU gets preloaded, and its environment
- `protobuf`: the wire format; `images`: the image files, typed; `pagemap_image`: page maps as
  arrays
- `image_changes`: edits before a restore; `opened_images`: which files CRIU opens by path
- `page_server`: the protocol in which CRIU sends pages; `hidden`: memory that it does not see

The C files are libraries that CRIU is preloaded with: `memcpy.c`, `pages.c` and `proc.c` for dumps,
`detach.c` for restores, `devices.c` as its plugin for GPUs.
"""

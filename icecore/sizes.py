"""The page and the cell: the units in which memory is tracked, read, stored and restored."""

#: Bytes of a page. Only machines with pages of 4 KiB are supported (x86-64).
PAGE = 4096
#: Bytes of a huge page.
HUGE_PAGE = 2 << 20

#: Bytes of a cell, the window of a space that is stored as one chunk.
CELL_BYTES = 1 << 20
CELL_PAGES = CELL_BYTES // PAGE
#: Bytes of a bitmap with one bit for each page of a cell.
BITMAP_BYTES = CELL_PAGES // 8

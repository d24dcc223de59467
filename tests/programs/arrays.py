"""Numpy memory that can be verified: page-aligned arrays, one sum a page, differences named by
address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = 4096
WORDS = PAGE // 8

Sums = NDArray[np.uint64]


def page_aligned(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """A zeroed array that starts on a page and whose memory is padded to whole pages.

    Alignment makes the pages of the array those of the address space, so that a difference can be
    named by page.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    backing = np.zeros(-(-size // PAGE) * PAGE + PAGE, dtype=np.uint8)
    skip = -backing.ctypes.data % PAGE
    return backing[skip : skip + size].view(dtype).reshape(shape)


def page_sums(array: NDArray[Any]) -> Sums:
    """One wrapping 64-bit sum for each page of a page-aligned, contiguous array of whole 8-byte
    words.

    A changed word, a page of zeros and an exchange of two pages all show; two words exchanged
    within a page do not.
    """
    words = array.reshape(-1).view(np.uint64)
    whole = words.size // WORDS * WORDS
    sums: Sums = words[:whole].reshape(-1, WORDS).sum(axis=1, dtype=np.uint64)
    if whole == words.size:
        return sums
    return np.append(sums, words[whole:].sum(dtype=np.uint64))


def differing_pages(name: str, array: NDArray[Any], expected: Sums) -> str:
    """Empty when the array's sums are the expected ones, else a sentence that names the first page
    that differs.
    """
    found = page_sums(array)
    if np.array_equal(found, expected):
        return ""
    bad = np.flatnonzero(found != expected)
    first = int(bad[0])
    address = array.ctypes.data + first * PAGE
    content = array.reshape(-1).view(np.uint8)[first * PAGE : (first + 1) * PAGE]
    zero = " and is all zero" if not content.any() else ""
    return (
        f"{name}: {bad.size} of {found.size} pages differ, first page {first} at {address:#x}{zero}"
    )


def differing_content(name: str, array: NDArray[Any], expected: NDArray[Any]) -> str:
    """Empty when both arrays hold the same bits, else a sentence that names the first page that
    differs.
    """
    found_words = array.reshape(-1).view(np.uint64)
    expected_words = np.ascontiguousarray(expected).reshape(-1).view(np.uint64)
    if np.array_equal(found_words, expected_words):
        return ""
    bad = np.flatnonzero(found_words != expected_words)
    pages = np.unique(bad // WORDS)
    address = array.ctypes.data + int(bad[0]) * 8
    return (
        f"{name}: {pages.size} pages differ from what was computed anew, first word at {address:#x}"
    )

"""Arrays as sets; rule: what numpy's ``unique`` and ``isin`` give, without ``numpy.ma``, which they load: that takes longer than a small collection."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The different elements of ``values``, ascending."""
    ordered = np.sort(values, axis=None)
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def among(values: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which of ``values`` are elements of ``wanted``; both of one dimension and of the same type."""
    if not len(wanted):
        return np.zeros(len(values), np.bool_)
    ordered = np.sort(wanted)
    at = np.searchsorted(ordered, values)
    at[at == len(ordered)] = 0
    found: npt.NDArray[np.bool_] = ordered[at] == values
    return found

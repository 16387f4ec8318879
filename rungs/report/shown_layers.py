"""What the layers of a run did, for the page: `layers.npy` as JSON, of few enough steps."""

import base64
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rungs.run.layer_record import STEP, Rows

_BYTES_OF_NUMBER = 8 / 3
"""Size of a bfloat16 in base64."""
_FEWEST_STEPS = 12


def layers_as_json(rows: Rows | None, events: Iterable[int], most_bytes: int) -> Any:
    """Return the steps, and by path, such as `heads/entropy`, an array with an axis of steps first;
    None without rows. If they don't fit into `most_bytes`, evenly spaced steps are left out, but
    not those before and after the steps of `events`."""
    if rows is None or not len(rows):
        return None
    rows = rows[np.argsort(rows[STEP], kind="stable")]
    arrays = dict(_leaves(rows))
    numbers = sum(array[0].size for array in arrays.values())
    most = max(int(most_bytes / _BYTES_OF_NUMBER / max(numbers, 1)), _FEWEST_STEPS)
    shown = chosen_rows(rows[STEP], list(events), most)
    return {
        "steps": rows[STEP][shown].tolist(),
        "series": {path: _encoded(array[shown]) for path, array in arrays.items()},
    }


def _leaves(rows: Rows, path: str = "") -> Iterator[tuple[str, NDArray[np.float32]]]:
    for name in rows.dtype.names or ():
        if rows.dtype[name].names:
            yield from _leaves(rows[name], f"{path}{name}/")
        elif rows.dtype[name].base == np.float32:
            yield f"{path}{name}", rows[name]


def chosen_rows(steps: NDArray[np.int64], events: list[int], most: int) -> NDArray[np.intp]:
    """Return the rows of at most `most` steps: the two around each of the latest events, as far as
    half of them go, and evenly spaced ones."""
    if len(steps) <= most:
        return np.arange(len(steps))
    after = np.searchsorted(steps, np.array(sorted(events)[-most // 4 :], np.int64))
    around = np.concatenate([after - 1, after])
    around = np.unique(around[(around >= 0) & (around < len(steps))])
    even = np.linspace(0, len(steps) - 1, most - len(around)).round().astype(np.intp)
    return np.union1d(around, even)


def _encoded(array: NDArray[np.float32]) -> dict[str, Any]:
    """Return numbers as base64 of little-endian bfloat16, which has their range and two digits."""
    rounded = (np.ascontiguousarray(array, "<f4").view("<u4") + 0x8000) >> 16
    exact = np.where(np.isnan(array), 0x7FC0, rounded).astype("<u2")
    return {"shape": list(array.shape), "base64": base64.b64encode(exact.tobytes()).decode()}

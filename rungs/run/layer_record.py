"""`layers.npy`: with `watch_interval`, what each layer did at every so many steps.

A NumPy file of a structured array with a row per measured step, which `np.load` reads. Numbers are
float32; those of blocks have an axis of layers, those of other parts one of length 1:

    step                           int64, counted from 0
    arrays.NAME.weight_rms         root mean square before the step; NAME is a trained array, such
                                   as attention.query.kernel, or "all" of a layer's together
    arrays.NAME.gradient_rms       of the mean gradient, before clipping
    arrays.NAME.update_rms         of the change by the step
    arrays.NAME.singular_values    the largest ones of a kernel, in descending order
    activations.NAME.rms, .largest root mean square and largest absolute value of embedding,
                                   residual (the stream after a block), attention_output and
                                   feed_forward_output (of the layer, before a norm after it)
    heads.entropy, .largest_logit  of each head's attention, in nats, and after scale and soft cap
    dead_units                     share of hidden units that no token of the step makes large

Rows are only appended. The header is written again after each, with the number of rows; a kill in
between leaves a row more than it says, or a part of one, which the next start removes."""

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rungs.common import disk, paths
from rungs.common.run_log import log

ARRAYS, ACTIVATIONS, HEADS, DEAD_UNITS = "arrays", "activations", "heads", "dead_units"
ALL_ARRAYS = "all"
WEIGHT, GRADIENT, UPDATE = "weight_rms", "gradient_rms", "update_rms"
SINGULAR_VALUES = "singular_values"
EMBEDDING, RESIDUAL = "embedding", "residual"
ATTENTION_OUTPUT, FEED_FORWARD_OUTPUT = "attention_output", "feed_forward_output"
RMS, LARGEST = "rms", "largest"
ENTROPY, LARGEST_LOGIT = "entropy", "largest_logit"
STEP = "step"

_LARGEST_HEADER = 1_000_000

Rows = NDArray[np.void]


def row_of(step: int, statistics: Mapping[str, Any]) -> Rows:
    """Return one row with nested statistics, whose leaves are arrays."""
    row = np.zeros(1, np.dtype([(STEP, "<i8"), *_fields(statistics)]))
    row[STEP] = step
    _fill(row, statistics)
    return row


def _fields(statistics: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (name, _fields(part)) if isinstance(part, Mapping) else (name, "<f4", part.shape)
        for name, part in statistics.items()
    ]


def _fill(row: Rows, statistics: Mapping[str, Any]) -> None:
    for name, part in statistics.items():
        if isinstance(part, Mapping):
            _fill(row[name], part)
        else:
            row[name][0] = part


def read(path: Path) -> Rows | None:
    """Return the rows of a file; None if there is none, or it is no such file."""
    if not paths.is_file(path):
        return None
    content = paths.read_bytes(path)
    try:
        dtype, start = _read_header(io.BytesIO(content))
    except ValueError:
        return None
    count = (len(content) - start) // dtype.itemsize
    return np.frombuffer(content, dtype, count, start)


def append(path: Path, row: Rows) -> None:
    """Add a row, durably, and start the file if it is missing. A file with other fields, as of
    another version, is renamed. Raises RunFailure."""
    with disk.writing(path, f"the layers of step {row[STEP][0]}", row.nbytes):
        if not paths.is_there(path):
            disk.replace_file(path, _as_bytes(row))
            return
        with disk.open_to_change(path) as file:
            try:
                dtype, start = _read_header(file)
            except ValueError:
                dtype, start = None, 0
            if dtype == row.dtype:
                size = os.fstat(file.fileno()).st_size
                count = (size - start) // row.itemsize
                file.seek(start + count * row.itemsize)
                file.write(row.tobytes())
                file.truncate()
                file.flush()
                file.seek(0)
                file.write(_header(row.dtype, count + 1))
                disk.flush(file)
                return
        aside = path.with_name(f"{path.stem}-before-step-{row[STEP][0]}{path.suffix}")
        log.warning("%s: has other fields than now; renamed to %s", path, aside.name)
        disk.replace(path, aside)
        disk.replace_file(path, _as_bytes(row))


def drop_after(path: Path, step: int) -> None:
    """Remove the rows of steps after the one that a start goes back to; raises RunFailure."""
    rows = read(path)
    if rows is None:
        return
    kept = rows[rows[STEP] <= step]
    content = _as_bytes(kept) if len(kept) else b""
    with disk.writing(path, "the layers so far", len(content)):
        if not content:
            disk.remove(path)
        elif content != paths.read_bytes(path):
            disk.replace_file(path, content)


def _as_bytes(rows: Rows) -> bytes:
    return _header(rows.dtype, len(rows)) + rows.tobytes()


def _header(dtype: np.dtype[Any], count: int) -> bytes:
    """Return a header, whose length does not depend on the number of rows."""
    header = io.BytesIO()
    description = np.lib.format.dtype_to_descr(dtype)
    fields = {"descr": description, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_2_0(header, fields)
    return header.getvalue()


def _read_header(file: Any) -> tuple[np.dtype[Any], int]:
    """Return the fields of a row, and where the first one starts. Raises ValueError if the file is
    of another kind."""
    if np.lib.format.read_magic(file) != (2, 0):
        raise ValueError("not version 2.0")
    _, is_fortran, dtype = np.lib.format.read_array_header_2_0(file, _LARGEST_HEADER)
    if is_fortran or dtype.hasobject or STEP not in (dtype.names or ()):
        raise ValueError("not a structured array with steps")
    return dtype, file.tell()

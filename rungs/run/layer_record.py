"""`layers.npy`: with `watch_interval`, what each layer did at every so many steps.

A NumPy file of a structured array with a row per measured step, which `np.load` reads. Numbers are
float32; those of blocks have an axis of layers, with NaN where a layer has no such part, those of
other parts one of length 1:

    step                           int64, counted from 0
    arrays.NAME.weight_rms         root mean square before the step; NAME is a trained array, such
                                   as attention.query.kernel, or "all" of a layer's together
    arrays.NAME.gradient_rms       of the mean gradient, before clipping
    arrays.NAME.update_rms         of the change by the step
    arrays.NAME.singular_value     the largest one of a kernel
    activations.NAME.rms, .largest root mean square and largest absolute value of embedding,
                                   residual (the stream after a block), attention_output and
                                   feed_forward_output (of the layer, before a norm after it)
    heads.entropy, .largest_logit  of each head's attention, in nats, and after scale and soft cap
    dead_units                     share of hidden units that no token of the step makes large

Rows are only appended. The header is written again after each, with the number of rows; a kill in
between leaves a row more than it says, or a part of one, which the next start removes."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rungs.common import disk
from rungs.common.run_log import log

ARRAYS, ACTIVATIONS, HEADS, DEAD_UNITS = "arrays", "activations", "heads", "dead_units"
ALL_ARRAYS = "all"
WEIGHT, GRADIENT, UPDATE = "weight_rms", "gradient_rms", "update_rms"
SINGULAR_VALUE = "singular_value"
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
    """Return the rows of a file, mapped into memory; None if there is none or, with a warning, if
    it is damaged."""
    if not path.is_file():
        return None
    try:
        rows = np.load(path, mmap_mode="r", max_header_size=_LARGEST_HEADER)
        if rows.ndim == 1 and STEP in (rows.dtype.names or ()):
            return rows
    except Exception:  # NumPy also tries what Python 2 wrote
        pass
    log.warning("%s: damaged, or not a record of layers", path)
    return None


def append(path: Path, row: Rows) -> None:
    """Add a row, durably, and start the file if it is missing. A damaged file, or one with other
    fields, as of another version, is renamed. Raises RunFailure."""
    with disk.writing(path, f"the layers of step {row[STEP][0]}", row.nbytes):
        rows = read(path)
        if path.exists() and (rows is None or rows.dtype != row.dtype):
            aside = path.with_stem(f"{path.stem}-before-step-{row[STEP][0]}")
            log.warning("%s: damaged, or has other fields; renamed to %s", path, aside.name)
            path.replace(aside)
        if rows is None or rows.dtype != row.dtype:
            disk.replace_file(path, _as_bytes(row))
            return
        with path.open("r+b") as file:
            file.seek(len(_header(rows.dtype, len(rows))) + rows.nbytes)
            file.write(row.tobytes())
            file.truncate()
            file.flush()
            file.seek(0)
            file.write(_header(row.dtype, len(rows) + 1))
            disk.flush(file)


def up_to(path: Path, step: int) -> bytes:
    """Return a file with the rows up to a step; empty if there are none."""
    rows = read(path)
    return b"" if rows is None else _as_bytes(rows[rows[STEP] <= step])


def drop_after(path: Path, step: int) -> None:
    """Remove the rows of steps after the one that a start goes back to. Raises RunFailure."""
    if read(path) is None:
        return
    content = up_to(path, step)
    with disk.writing(path, "the layers so far", len(content)):
        if content:
            disk.replace_file(path, content)
        else:
            disk.remove(path)


def _as_bytes(rows: Rows) -> bytes:
    """Return the content of a file; empty without rows."""
    return _header(rows.dtype, len(rows)) + rows.tobytes() if len(rows) else b""


def _header(dtype: np.dtype[Any], count: int) -> bytes:
    """Return a header, whose length does not depend on the number of rows."""
    header = io.BytesIO()
    description = np.lib.format.dtype_to_descr(dtype)
    fields = {"descr": description, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_2_0(header, fields)
    return header.getvalue()

"""The optimizer state of a checkpoint, in `optimizer/`, as Orbax and TensorStore's OCDBT format."""

import functools
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rungs.common.errors import reason

if TYPE_CHECKING:
    import jax

OPTIMIZER_FOLDER = "optimizer"
_CHUNK_BYTES = 1 << 26
"""Bytes that Orbax reads at once; small, so a device reads little beyond its own shard."""
_MOST_SECONDS = 10 * 365 * 24 * 3600
"""Time limit of a save by one process. Orbax measures it by a clock that jumps, as when a laptop
wakes up."""
_MISREAD = re.compile(r"[*?\[\\\ud800-\udfff]|^/(gs|s3|az|hf)/")


def save_async(checkpoint: Path, arrays: Mapping[str, "jax.Array | np.ndarray"]) -> Any:
    """Start saving arrays and return Orbax's response, once the arrays may change again. Its
    `result()` waits until everything is saved."""
    import jax
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.enable_write_sharding_file = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Otherwise Orbax blocks training to compile one program per array that slices out replica
    # parts.
    context.array.saving.use_replica_parallel = False
    # It takes as long as the rest together, and makes trained moments only 8% smaller.
    context.array.saving.use_compression = False
    # Otherwise threads wait five minutes for a folder that cannot be created.
    context.asynchronous.create_directories_asynchronously = False
    if jax.process_count() == 1:
        context.asynchronous.timeout_secs = _MOST_SECONDS
    with context:
        return ocp.save_async(_folder_of(checkpoint), arrays)


def load(
    checkpoint: Path, abstract: Mapping[str, "jax.ShapeDtypeStruct"], may_pad: bool = False
) -> "dict[str, jax.Array]":
    """Return saved arrays, each read directly onto its devices. `abstract` has their shapes, dtypes
    and shardings; with `may_pad` the saved shapes may differ."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = may_pad
    with context:
        loaded: dict[str, jax.Array] = ocp.load(_folder_of(checkpoint), abstract)
    return loaded


def load_to_host(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return saved arrays exactly as they are on disk."""
    import jax
    from orbax.checkpoint import v1 as ocp

    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for name, array in ocp.metadata(_folder_of(checkpoint)).metadata.items()
    }
    return {name: np.asarray(array) for name, array in load(checkpoint, abstract).items()}


def damage(checkpoint: Path) -> str | None:
    """Return why an optimizer state can't be opened; None if all metadata and chunks are there."""
    try:
        missing = next(_missing_keys(_folder_of(checkpoint) / "state"), None)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return f"{OPTIMIZER_FOLDER}: {reason(error)}"
    return f"{OPTIMIZER_FOLDER}: lacks {missing}" if missing else None


def _missing_keys(folder: Path) -> Iterator[str]:
    import tensorstore

    metadata = json.loads((folder / "_METADATA").read_text(encoding="utf-8"))
    if not (metadata.get("use_ocdbt") and metadata.get("use_zarr3")):  # earlier versions of Orbax
        return
    file = {"driver": "file", "path": f"{folder}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": file}).result()
    stored = {key.decode() for key in store.list().result()}
    for entry in metadata["tree_metadata"].values():
        name = ".".join(str(part["key"]) for part in entry["key_metadata"])
        yield from (key for key in _keys_of(name, store) if key not in stored)


def _keys_of(array: str, store: Any) -> Iterator[str]:
    """Yield the chunk keys of a Zarr 3 array:
    https://zarr-specs.readthedocs.io/en/latest/v3/chunk-key-encodings/default/index.html"""
    description = f"{array}/zarr.json"
    yield description
    found = json.loads(store.read(description).result().value)
    chunk = found["chunk_grid"]["configuration"]["chunk_shape"]
    grid = [math.ceil(size / step) for size, step in zip(found["shape"], chunk, strict=True)]
    for place in np.ndindex(*grid):
        yield "/".join([array, "c", *map(str, place)])


def literal_path(folder: Path) -> Path:
    """Return an absolute path that Orbax and TensorStore take literally. They interpret patterns
    such as `[1]`, backslashes and a leading `/gs/`, and fail on names that are not UTF-8; such a
    folder is reached through a link in a temporary folder."""
    path = folder.resolve()
    if is_literal(path):
        return path
    link = Path(_links().name, hashlib.sha256(os.fsencode(path)).hexdigest())
    if not link.is_symlink():
        link.symlink_to(path)
    return link


def is_literal(path: Path) -> bool:
    """Whether Orbax and TensorStore take an absolute path literally."""
    return not _MISREAD.search(path.as_posix())


@functools.cache
def _links() -> "tempfile.TemporaryDirectory[str]":
    """Return a temporary folder for links, removed at exit."""
    return tempfile.TemporaryDirectory(prefix="rungs-")


def _folder_of(checkpoint: Path) -> Path:
    return literal_path(checkpoint) / OPTIMIZER_FOLDER

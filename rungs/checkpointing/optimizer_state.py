"""The optimizer state of a checkpoint, in its folder `optimizer/`: written, read and checked by
Orbax with TensorStore, in its OCDBT format."""

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
"""Bytes that Orbax reads at once: small, so that a device reads little beyond its own shard."""
_MISREAD = re.compile(r"[*?\[\\\ud800-\udfff]|^/(gs|s3|az|hf)/")


def save_async(checkpoint: Path, arrays: Mapping[str, "jax.Array | np.ndarray"]) -> Any:
    """Start saving arrays; return Orbax's response once the arrays may change. Its `result()` waits
    until they are saved."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.enable_write_sharding_file = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Otherwise Orbax compiles a program per array to slice out each replica's part, while training
    # waits.
    context.array.saving.use_replica_parallel = False
    # It takes as long as all else, and the moments of a trained model become only 8% smaller.
    context.array.saving.use_compression = False
    # Otherwise threads wait five minutes for a folder that cannot be created.
    context.asynchronous.create_directories_asynchronously = False
    with context:
        return ocp.save_async(_folder_of(checkpoint), arrays)


def load(
    checkpoint: Path, abstract: Mapping[str, "jax.ShapeDtypeStruct"], may_pad: bool = False
) -> "dict[str, jax.Array]":
    """Return saved arrays, each read straight onto its devices. `abstract` has their shapes, dtypes
    and shardings; with `may_pad` saved shapes may differ from these."""
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
    """Return what keeps an optimizer state from being opened, None if it has the descriptions of
    all arrays and all their chunks."""
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
    """Yield the keys of an array in the Zarr 3 format:
    https://zarr-specs.readthedocs.io/en/latest/v3/chunk-key-encodings/default/index.html"""
    description = f"{array}/zarr.json"
    yield description
    found = json.loads(store.read(description).result().value)
    chunk = found["chunk_grid"]["configuration"]["chunk_shape"]
    grid = [math.ceil(size / step) for size, step in zip(found["shape"], chunk, strict=True)]
    for place in np.ndindex(*grid):
        yield "/".join([array, "c", *map(str, place)])


def literal_path(folder: Path) -> Path:
    """Return an absolute path to a folder that Orbax and TensorStore take as it is. They read `[1]`
    and other patterns, backslashes, and `/gs/` at the start as something else, and fail at names
    that are not UTF-8. Such a folder is reached through a link in a temporary folder."""
    path = folder.resolve()
    if is_literal(path):
        return path
    link = Path(_links().name, hashlib.sha256(os.fsencode(path)).hexdigest())
    if not link.is_symlink():
        link.symlink_to(path, target_is_directory=True)
    return link


def is_literal(path: Path) -> bool:
    """Whether Orbax and TensorStore take an absolute path as it is."""
    return not _MISREAD.search(path.as_posix())


@functools.cache
def _links() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="rungs-")


def _folder_of(checkpoint: Path) -> Path:
    return literal_path(checkpoint) / OPTIMIZER_FOLDER

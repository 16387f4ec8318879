"""The optimizer state of a checkpoint, in `optimizer/`, as Orbax and TensorStore's OCDBT format."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rungs.checkpointing.manifest import OPTIMIZER_FOLDER
from rungs.common.errors import UserError

if TYPE_CHECKING:
    import jax

_CHUNK_BYTES = 1 << 26
"""Bytes that Orbax reads at once; small, so a device reads little beyond its own shard."""
_MISREAD = re.compile(r"[*?\[\\]|^/(gs|s3|az|hf)/")
"""What Orbax and TensorStore take for a pattern, an escape or a bucket: Orbax would read `run1`
for `run?`, too."""


def save_async(checkpoint: Path, arrays: Mapping[str, "jax.Array | np.ndarray"]) -> Any:
    """Start saving arrays and return Orbax's response, once the arrays may change again. Its
    `result()` waits until everything is saved."""
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


def refuse_misread(path: Path) -> None:
    """Raise UserError if Orbax would read or write at another path than this one."""
    if _MISREAD.search(path.resolve().as_posix()):
        raise UserError(
            f"{path}: the path of a run can't have *, ?, [ or a backslash, or begin with /gs/,"
            " /s3/, /az/ or /hf/, as Orbax would read another one; rename the folder"
        )


def _folder_of(checkpoint: Path) -> Path:
    refuse_misread(checkpoint)
    return checkpoint.resolve() / OPTIMIZER_FOLDER

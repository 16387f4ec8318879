"""Save a training and go on with it. Task: `assignment/tasks/checkpoint.md`.

A checkpoint is one safetensors file, which any program can read:

    model.PATH        every variable of the model but its caches, such as
                      model.layers.0.MHA.Q_proj.weights
    optimizer.PATH    every variable of the optimizer, such as optimizer.step
    iteration         a scalar int64: the steps that are done
    metadata          "config": a JSON object of the model's plain attributes
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

SAVED = nnx.Not(nnx.Cache)
"""Caches are computed again when a model is made."""
DTYPES = {
    **{"F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I32": "int32", "U32": "uint32", "I64": "int64"},
}
"""NumPy's names of dtypes by those of safetensors."""


def save_checkpoint(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    iteration: int,
    out: str | os.PathLike[str] | BinaryIO,
) -> None:
    """Write a model, its optimizer and the number of steps done, to a path or an open file.

    A file that is there is replaced only when the new one is complete. The config in the metadata
    has the model's attributes that are numbers or text and whose names begin with a letter.
    """
    state = _named("model", nnx.state(model, SAVED)) | _named("optimizer", nnx.state(optimizer))
    tensors = {name: np.asarray(array, order="C") for name, array in state.items()}
    tensors["iteration"] = np.asarray(iteration, np.int64)
    config = {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, int | float | str) and name[0].isalpha()
    }
    content = safetensors.numpy.save(tensors, metadata={"config": json.dumps(config)})
    if isinstance(out, str | os.PathLike):
        partial = Path(f"{os.fspath(out)}.partial")
        partial.write_bytes(content)
        partial.replace(out)
    else:
        out.write(content)


def load_checkpoint(
    src: str | os.PathLike[str] | BinaryIO, model: nnx.Module, optimizer: nnx.Optimizer
) -> int:
    """Restore a model and its optimizer in place, and return the number of steps done. Arrays go to
    the devices where those of the model are.

    Args:
        src: a path or an open file.
        model, optimizer: of the same shapes as those that were saved.

    Raises:
        ValueError: the checkpoint is of another model or optimizer; neither is changed.
    """
    content = Path(src).read_bytes() if isinstance(src, str | os.PathLike) else src.read()
    tensors = {name: _array(view) for name, view in safetensors.deserialize(content)}
    iteration = int(tensors.pop("iteration"))
    model_state, optimizer_state = nnx.state(model, SAVED), nnx.state(optimizer)
    expected = _named("model", model_state) | _named("optimizer", optimizer_state)
    if wrong := sorted(_kinds(expected).items() ^ _kinds(tensors).items()):
        raise ValueError(f"{wrong[0][0]} is not the same in the checkpoint and here")
    nnx.update(model, _filled("model", model_state, tensors))
    nnx.update(optimizer, _filled("optimizer", optimizer_state, tensors))
    return iteration


def _name(part: str, path: tuple[Any, ...]) -> str:
    return ".".join(map(str, (part, *path)))


def _named(part: str, state: nnx.State) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(state)
    return {_name(part, path): variable.get_value() for path, variable in flat}


def _kinds(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, tuple[Any, ...]]:
    return {name: (array.shape, array.dtype.name) for name, array in arrays.items()}


def _array(view: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(view["data"], DTYPES[view["dtype"]]).reshape(view["shape"])


def _filled(part: str, state: nnx.State, tensors: dict[str, np.ndarray]) -> nnx.State:
    """Return a state with the values of the checkpoint, on the devices of the old ones."""

    def restored(path: tuple[Any, ...], variable: nnx.Variable[jax.Array]) -> Any:
        device = variable.get_value().sharding
        return variable.copy(jax.device_put(tensors[_name(part, path)], device))

    return nnx.map_state(restored, state)

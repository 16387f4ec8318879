"""Saved arrays put back onto devices, for a run that resumes or starts from saved weights."""

from collections.abc import Collection

import jax
import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing import optimizer_state
from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.weights_file import Weights
from rungs.config.run_config import AnyRunConfig
from rungs.model.gpt import GPT
from rungs.model.lora import LOW_RANK_NAMES
from rungs.optim.multi_steps import MultiSteps
from rungs.step.state import AbstractModel, AbstractState


def restore(
    saved: Checkpoint, config: AnyRunConfig, total_steps: int, mesh: Mesh
) -> tuple[GPT, MultiSteps]:
    """Return the model and optimizer of a checkpoint, each array read straight onto its devices.
    Verify the checkpoint's files first: see `Checkpoint.damage`."""
    abstract = AbstractState(config, total_steps, mesh)
    weights = place_weights(saved.weights, abstract, cast=abstract.trained)
    # earlier versions saved Adafactor's state with vocabulary padding
    is_padded = abstract.is_padded or config.train.optimizer == "adafactor"
    optimizer = optimizer_state.load(saved.folder, abstract.optimizer, may_pad=is_padded)
    return abstract.fill(weights, optimizer)


def place_starting_weights(
    weights: Weights | None, config: AnyRunConfig, total_steps: int, mesh: Mesh
) -> dict[str, jax.Array]:
    """Return saved parameters for a run to start from, on its devices; empty if there are none.
    Parameters that the run trains are cast to float32. With LoRA the frozen ones keep the dtype
    they were saved in."""
    if weights is None:
        return {}
    abstract = AbstractState(config, total_steps, mesh)
    return place_weights(weights, abstract, cast=abstract.trained, skip=LOW_RANK_NAMES)


def place_weights(
    weights: Weights,
    abstract: AbstractModel | AbstractState,
    cast: Collection[str] = (),
    skip: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    """Read parameters one at a time and put each onto its devices, with the shapes and shardings of
    `abstract`. Those named in `cast` get their dtype there, others keep their own. `skip` are
    endings of names to leave out."""
    names = [name for name in abstract.weights if not name.endswith(skip)]
    weights.check_tensors({name: abstract.shapes[name] for name in names})

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = weights.array(name)
        return place_padded(array.astype(leaf.dtype, copy=False) if name in cast else array, leaf)

    return {name: place(name, abstract.weights[name]) for name in names}


def place_padded(array: np.ndarray, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Put an array onto its devices, with zeros for the padding of the vocabulary. `like` has the
    padded shape and the sharding."""
    padding = [(0, size - own) for size, own in zip(like.shape, array.shape, strict=True)]
    padded = np.pad(array, padding) if like.shape != array.shape else array
    return jax.make_array_from_callback(like.shape, like.sharding, lambda at: padded[at])

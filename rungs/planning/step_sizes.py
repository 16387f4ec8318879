"""Sizes on each device that the memory of a step depends on.

Axis suffixes as in `rungs/model/gpt.py`.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from rungs.config.optimization_config import Remat
from rungs.config.run_config import RunConfig
from rungs.model.kernels.cross_entropy import chunk_tokens
from rungs.model.layer_loop import LayerLoop, layer_loop, periods
from rungs.optim.precision import dtype_of
from rungs.parallel.mesh import size_along
from rungs.parallel.names import BLOCKS, CONTEXT, DATA, HEAD, TENSOR, TOKEN_EMBEDDING
from rungs.parallel.sharding import Layout, sharded_axis
from rungs.planning.activations import Activations
from rungs.planning.communication import FLOAT32_BYTES, INT32_BYTES
from rungs.step.state import AbstractArrays


class StepSizes(NamedTuple):
    """A run and what was traced of it. All sizes are in bytes on a device, except where they count
    tokens, rows or elements."""

    config: RunConfig
    mesh: Mesh
    weights: AbstractArrays
    gradients_of_microbatch: AbstractArrays
    kept: Mapping[Remat, Activations]
    """Activations of a microbatch, by setting of `remat`."""

    @property
    def loop(self) -> LayerLoop:
        return layer_loop(self.config.train, self.config.model)

    @property
    def remat(self) -> Remat:
        return self.loop.remat

    @property
    def layers(self) -> int:
        return self.config.model.n_layers

    @property
    def period(self) -> int:
        """Layers of one period of `layer_pattern`, which are compiled together."""
        return len(self.config.model.repeated_kinds)

    @property
    def is_unrolled(self) -> bool:
        """Whether there is no loop over layers."""
        return self.layers > 0 and self.loop.unroll >= periods(self.config.model)

    @property
    def accumulates(self) -> bool:
        return self.config.train.gradient_accumulation_steps > 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the compute dtype."""
        return dtype_of(self.config.train).itemsize

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        rows = self.config.train.microbatch_size // self.mesh.shape[DATA]
        return rows * self.config.sequence_length // size_along(self.mesh, CONTEXT)

    @property
    def batch(self) -> int:
        """Inputs and targets of a step."""
        return 2 * self.tokens * self.config.train.gradient_accumulation_steps * INT32_BYTES

    @property
    def vocabulary(self) -> int:
        """Rows of the vocabulary, padding included."""
        rows = Layout(self.mesh).padded_vocab_size(self.config.model.vocab_size)
        return rows // size_along(self.mesh, TENSOR)

    @property
    def head(self) -> int:
        """Elements of the output head."""
        return self.vocabulary * self.config.model.emb_dim

    @property
    def is_head_trained(self) -> bool:
        name = TOKEN_EMBEDDING if self.config.model.tied_embeddings else HEAD
        return any(trained.startswith(name) for trained in self.gradients_of_microbatch)

    @property
    def hidden(self) -> int:
        """Elements of the hidden states of a microbatch."""
        return self.tokens * self.config.model.emb_dim

    @property
    def logits(self) -> int:
        """Elements of a chunk's logits."""
        return chunk_tokens(self.tokens, self.vocabulary) * self.vocabulary

    @property
    def is_chunked(self) -> bool:
        """Whether the logits of a microbatch are computed in several chunks."""
        return self.logits < self.tokens * self.vocabulary

    @property
    def gradients(self) -> int:
        """Gradients of a microbatch."""
        return bytes_per_device(self.gradients_of_microbatch)

    @property
    def layer_gradients(self) -> int:
        """Gradients of all layers."""
        return bytes_per_device(_in_layers(self.gradients_of_microbatch))

    @property
    def gathered_layers(self) -> int:
        """One period's layers whose weights are gathered from shards."""
        return self._gathered_in_period(self.weights) * self.itemsize

    @property
    def scattered_gradients(self) -> int:
        """One period's gradients that are computed whole and reduce-scattered to shards."""
        return self._gathered_in_period(self.gradients_of_microbatch) * FLOAT32_BYTES

    @property
    def gathered_outside(self) -> int:
        """Weights outside the layers that are gathered from shards. Token embeddings are looked up
        in shards."""
        narrow = (HEAD, TOKEN_EMBEDDING) if self.config.model.tied_embeddings else (HEAD,)
        total = 0
        for name, array in self.weights.items():
            if name.startswith(narrow):
                total += _gathered_elements(array) * self.itemsize
            elif not name.startswith((BLOCKS, TOKEN_EMBEDDING)):
                total += _gathered_elements(array) * FLOAT32_BYTES
        return total

    def in_layer(self, remat: Remat) -> int:
        """Return what one layer keeps for the backward pass."""
        return self.kept[remat].in_layers // max(self.layers, 1)

    def _gathered_in_period(self, arrays: AbstractArrays) -> int:
        """Return the elements, gathered, of one period's layers of which a device has a shard."""
        elements = sum(map(_gathered_elements, _in_layers(arrays).values()))
        return elements * self.period // max(self.layers, 1)


def _in_layers(arrays: AbstractArrays) -> AbstractArrays:
    return {name: array for name, array in arrays.items() if name.startswith(BLOCKS)}


def bytes_per_device(arrays: AbstractArrays) -> int:
    """Return the bytes of each device's parts of arrays."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in arrays.values()
        if array.sharding is not None
    )


def _gathered_elements(array: jax.ShapeDtypeStruct) -> int:
    """Return the elements of a parameter gathered along the axis that FSDP shards; 0 if none."""
    assert isinstance(array.sharding, NamedSharding)
    if (axis := sharded_axis(array.sharding.spec)) is None:
        return 0
    shard = math.prod(array.sharding.shard_shape(array.shape))
    return shard * size_along(array.sharding.mesh, *axis.mesh_axes)

"""Memory of a training step on each device, by component, computed without running it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from rungs.config.optimization_config import Remat
from rungs.config.run_config import RunConfig
from rungs.model.gpt import GPT
from rungs.model.layer_loop import layer_loop
from rungs.optim.multi_steps import MultiSteps
from rungs.parallel import target_device
from rungs.parallel.mesh import BLOCKS
from rungs.parallel.sharding import Layout
from rungs.planning import peaks
from rungs.step.state import AbstractArrays, AbstractState

Dtypes = Mapping[str, str]
"""NumPy names of dtypes, by parameter name."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device during a step."""

    weights: int
    moments: int
    """Optimizer state."""
    gradients: int
    """Gradients of the layers for one microbatch."""
    accumulator: int
    """Sum of the gradients over microbatches, if there are several."""
    gathered: int
    """Full copies of one layer's sharded weights; in FP8 also all layers' kernels in 8 bits."""
    activations: int
    """Residuals of a microbatch: values kept from the forward for the backward pass."""
    logits: int
    """A chunk of logits and what exists with it: gathered output head, gradients of the head."""
    layer: int
    """Arrays of one layer's backward pass, which don't coexist with the logits."""
    batch: int
    """Token ids of a step."""
    error: float
    """Relative error of the total against the compiled step."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by component."""
        return {name: size for name, size in dataclasses.asdict(self).items() if name != "error"}

    @property
    def total(self) -> int:
        """Peak memory."""
        parts = self.parts
        logits, layer = parts.pop("logits"), parts.pop("layer")
        return sum(parts.values()) + max(logits, layer)


_FLOAT8_ERROR = 0.25
"""Relative error in FP8: activations are counted as in compute_dtype, but a compiled step of 1.1B
parameters needs a fifth less."""
MEMORY_LABELS = {
    "accumulator": "gradient sum",
    "gathered": "all-gathered",
    "layer": "backward",
    "batch": "token ids",
}
"""Labels in tables for fields of `Memory`, where different."""


def memory_of(config: RunConfig, mesh: Mesh, stored: Dtypes | None = None) -> Memory:
    """Return the memory of a run's step; arguments as for `MemoryEstimates`."""
    remat = layer_loop(config.train, config.model).remat
    return MemoryEstimates(config, mesh, [remat], stored).of(config)


class MemoryEstimates:
    """The memory of a run's step for several values of `remat` and `microbatch_size`, sharing
    traces, which take most of the time. Weights, moments and gradients are exact; activations are
    the residuals of the loss; `logits` and `layer`, the temporary arrays, are rules that agree with
    the compiler's own analysis."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        settings: Sequence[Remat],
        stored: Dtypes | None = None,
    ) -> None:
        """Trace the step. The mesh must be in the mode of `config.train.sharding`, and abstract for
        planned devices (`target_device.trace_for`). `settings` are the values of `remat` that `of`
        may get. `stored` has the starting weights' dtypes in their file, which frozen ones keep
        with LoRA."""
        self._mesh = mesh
        self._microbatch_size = config.train.microbatch_size
        self._abstract = AbstractState(config, 1, mesh)
        self._weights = as_stored(self._abstract, stored or {})
        state = self._abstract.fill(self._weights, self._abstract.optimizer)  # type: ignore[arg-type]
        needed: set[Remat] = {"none", "dots", *settings} if config.model.n_layers else {*settings}
        self._kept = {
            remat: peaks.activations_of(
                RunConfig(config.model, config.train.model_copy(update={"remat": remat})),
                mesh,
                *state,
            )
            for remat in needed
        }

    def of(self, config: RunConfig) -> Memory:
        """Return the memory of a run that differs at most in `remat`, `microbatch_size` and
        `gradient_accumulation_steps`."""
        rows, traced = config.train.microbatch_size, self._microbatch_size
        kept = {
            remat: peaks.Activations(*(size * rows // traced for size in sizes))
            for remat, sizes in self._kept.items()
        }
        peak = (peaks.CpuPeak if target_device.platform() == "cpu" else peaks.AcceleratorPeak)(
            config, self._mesh, self._weights, self._gradients_of(config), kept
        )
        return Memory(
            weights=peaks.bytes_per_device(self._weights),
            moments=peaks.bytes_per_device(self._abstract.optimizer),
            gradients=peak.layer_gradients,
            accumulator=peak.gradients if peak.accumulates else 0,
            gathered=peak.gathered_layers + self._float8_bytes(config),
            activations=peak.activation_bytes,
            logits=peak.logits_bytes,
            layer=peak.layer_bytes,
            batch=peak.batch,
            error=max(peak.error, _FLOAT8_ERROR if config.train.uses_float8 else 0),
        )

    def _float8_bytes(self, config: RunConfig) -> int:
        """Return the bytes of the blocks' kernels in 8 bits, if a run uses FP8."""
        in_blocks = (n for n in self._weights if n.startswith(BLOCKS) and n.endswith(".kernel"))
        kernels = {name: self._weights[name] for name in in_blocks}
        return peaks.bytes_per_device(kernels) // 4 if config.train.uses_float8 else 0

    def _gradients_of(self, config: RunConfig) -> AbstractArrays:
        """Return a microbatch's gradients. Those of a single microbatch are reduced as soon as they
        are computed, and then in the layout for updates."""
        layout = Layout.of(config.train.sharding, self._mesh)
        is_single = config.train.microbatches_per_step == 1
        weights = self._abstract.weights_in(layout.for_updates if is_single else layout)
        return {name: weights[name] for name in self._abstract.trained}


def as_stored(abstract: AbstractState, stored: Dtypes) -> AbstractArrays:
    """Return the weights of a state, with frozen ones in their stored dtypes."""
    return {
        name: array
        if name in abstract.trained or name not in stored
        else jax.ShapeDtypeStruct(array.shape, jnp.dtype(stored[name]), sharding=array.sharding)
        for name, array in abstract.weights.items()
    }


def state_bytes(model: GPT, optimizer: MultiSteps) -> int:
    """Return the bytes per device of a model, its optimizer state, a gradient and its sum."""
    trainable = nnx.state(model, optimizer.wrt)
    states = nnx.state(model), nnx.state(optimizer), trainable, trainable
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(states)
    )


def format_bytes(size: float) -> str:
    """Return bytes in MB or GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"

"""Plans that share what they trace, which takes most of a plan's time."""

from typing import Any

import jax
import pytest
from flax import nnx
from jax.sharding import Mesh

from rungs.config.run_config import RunConfig
from rungs.model.gpt import GPT
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel import target_device
from rungs.planning import memory
from rungs.planning.memory import Activations

LENGTHS = {
    *("dataset", "epochs", "max_minutes", "min_train_tokens", "validation_tokens", "start_from"),
}
"""Keys of `train.json` that are not about a step."""
_activations_of = memory.activations_of
_traced: dict[Any, Activations] = {}


def share_traces(patch: pytest.MonkeyPatch) -> None:
    """Trace each step that plans need once. Not for tests that replace what a step calls."""
    patch.setattr(memory, "activations_of", _trace_once)


def _trace_once(
    config: RunConfig, mesh: Mesh, model: GPT, optimizer: SkippingOptimizer
) -> Activations:
    arrays = jax.tree.leaves(nnx.state((model, optimizer)))
    step = config.model.model_dump_json(), config.train.model_dump_json(exclude=LENGTHS)
    key = target_device.target(), target_device.is_compiled(), mesh, *step, *map(str, arrays)
    if key not in _traced:
        _traced[key] = _activations_of(config, mesh, model, optimizer)
    return _traced[key]

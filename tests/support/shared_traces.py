"""Plans that share what they trace, which takes most of a plan's time."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from flax import nnx

from rungs.config.run_config import RunConfig
from rungs.parallel import target_device
from rungs.planning import communication, forecast, memory

LENGTHS = {"dataset", "epochs", "max_minutes", "min_train_tokens", "validation_tokens"}
"""Keys of `train.json` that are not about a step."""
_SHARED = [
    (memory, "activations_of"),
    (communication, "planned_collectives"),
    (forecast, "hardware_flops_per_token"),
]
_traced: dict[Any, Any] = {}


def share_traces(patch: pytest.MonkeyPatch) -> None:
    """Trace each step that plans need once. Not for tests that replace what a step calls."""
    for module, name in _SHARED:
        patch.setattr(module, name, _once(getattr(module, name)))


def _once(trace: Callable[..., Any]) -> Callable[..., Any]:
    def traced(config: RunConfig, *others: Any) -> Any:
        """`others` are a mesh or layout, and abstract modules."""
        step = config.model.model_dump_json(), config.train.model_dump_json(exclude=LENGTHS)
        place = target_device.target(), target_device.is_compiled(), others[:1]
        arrays = map(str, jax.tree.leaves(nnx.state(others[1:])))
        key = trace.__name__, *place, *step, *arrays
        if key not in _traced:
            _traced[key] = trace(config, *others)
        return _traced[key]

    return traced

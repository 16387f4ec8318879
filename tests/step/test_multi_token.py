"""Multi-token prediction against the paper's formulas in float64, with its gradient; separate
documents; the same on every mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.checks.parallel import ParallelCase, ParallelCheck, compare
from rungs.config.run_config import RunConfig
from rungs.data.tokens.loader import Batch
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.model.layers import NO_DROPOUT
from rungs.model.prediction import PredictionModule
from rungs.objectives.multi_token import MultiToken
from rungs.step.objective import Microbatch
from rungs.step.state import named_arrays
from tests.support import reference_gpt
from tests.support.configs import model_config, train_config
from tests.support.tiny_model import quick_jit, random_model, with_random_parameters

WEIGHT, LENGTH = 0.7, 7
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"prediction_module": True},
    "llama": {
        **{"prediction_module": True, "positions": "rope", "norm": "rms_norm_plus_one"},
        **{"feed_forward": "swiglu", "tied_embeddings": True, "final_soft_cap": 3.0},
    },
}
MODELS["deepseek"] = MODELS["llama"] | {
    **{"n_layers": 3, "n_dense_layers": 2, "dense_ffn_dim": 9, "n_experts": 4, "ffn_dim": 5},
    **{"experts_per_token": 2, "expert_routing": {"scores": "sigmoid", "balance_bias": True}},
    **{"shared_ffn_dim": 6, "latent_attention": {"kv_rank": 6, "rope_dim": 4}},
}
"""Its module has experts, although the first layers have none."""
TRAIN = train_config(objective="multi_token", multi_token_weight=WEIGHT, load_balancing_weight=0.0)


def rows_of(separate: bool) -> tuple[np.ndarray, ...]:
    """Return inputs, targets and starts of two sequences; some targets don't count."""
    tokens = np.random.default_rng(4).integers(0, 32, (2, LENGTH + 1), np.int32)
    targets = tokens[:, 1:].copy()
    targets[0, :2] = -1
    starts = [[0, 0, 0, 0, 4, 4, 6], [0, 1, 1, 1, 1, 1, 1]]
    return tokens[:, :-1], targets, np.array(starts, np.int32) * separate


def expected_losses(config: Any, weights: Any, separate: bool) -> tuple[float, float]:
    """Return the loss of the next token and that of the module, both per target."""
    inputs, targets, starts = rows_of(separate)
    next_token, further = 0.0, 0.0
    for row in range(len(inputs)):
        for start in np.unique(starts[row]):
            place = starts[row] == start
            own = inputs[row, place]
            logits = reference_gpt.forward(config, weights, own)[-1]
            next_token += summed_loss(logits, targets[row, place])
            if len(own) > 1:
                logits = reference_gpt.further_logits(config, weights, own)
                further += summed_loss(logits, targets[row, place][1:])
    count = (targets >= 0).sum()
    return next_token / count, further / count


def summed_loss(logits: Any, targets: np.ndarray) -> float:
    pairs = zip(logits, targets, strict=True)
    return sum(-np.log(reference_gpt.softmax(row)[target]) for row, target in pairs if target >= 0)


def loss_and_aux(model: GPT, separate: bool) -> Any:
    inputs, targets, starts = rows_of(separate)
    arrays = (inputs, targets, starts) if separate else (inputs, targets)
    microbatch = Microbatch(tuple(map(jnp.asarray, arrays)), jnp.arange(2), jax.random.key(0))
    return MultiToken(TRAIN).loss(model, Compute(), microbatch)


@pytest.mark.parametrize(
    ("name", "separate"),
    [
        ("gpt2", True),
        ("llama", False),
        ("deepseek", False),
        pytest.param("llama", True, marks=pytest.mark.long),
    ],
)
def test_loss_and_gradient_are_those_of_the_paper(name: str, separate: bool) -> None:
    model = random_model(**MODELS[name])
    graph, state = nnx.split(model)

    def loss_of(state: nnx.State) -> Any:
        return loss_and_aux(nnx.merge(graph, state), separate)

    (loss, aux), gradient = quick_jit(jax.value_and_grad(loss_of, has_aux=True))(state)
    weights = {k: np.asarray(v, np.float64) for k, v in named_arrays(model).items()}
    next_token, further = expected_losses(model.config, weights, separate)
    for one in (loss, aux.loss):
        np.testing.assert_allclose(one / aux.weight, next_token + WEIGHT * further, rtol=1e-5)

    rng = np.random.default_rng(2)
    gradients = {k: np.asarray(v) / aux.weight for k, v in _named(gradient).items()}
    for part in ("prediction.", ""):  # of the module alone, and of all weights
        direction = {k: rng.normal(size=w.shape) * k.startswith(part) for k, w in weights.items()}
        ends = []
        for sign in (1, -1):
            moved = {k: w + sign * 1e-5 * direction[k] for k, w in weights.items()}
            one, other = expected_losses(model.config, moved, separate)
            ends.append(one + WEIGHT * other)
        slope = sum((gradients[k] * direction[k]).sum() for k in weights)
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-5, rtol=1e-4)


def _named(state: nnx.State) -> dict[str, Any]:
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def test_in_a_hybrid_the_module_is_a_layer_with_attention_and_its_positions() -> None:
    own = {"layer_pattern": ["delta_net", "global"], "delta_net": {"key_heads": 2, "key_dim": 4}}
    x_BSD, known_BSD = np.random.default_rng(3).normal(size=(2, 2, LENGTH, 16)).astype(np.float32)

    def of(**keys: Any) -> Any:
        config = model_config(positions="rope", **keys)
        module = with_random_parameters(lambda: PredictionModule(config, jax.random.key(0)))
        return module(x_BSD, known_BSD, NO_DROPOUT, Compute(), None)[0]

    np.testing.assert_array_equal(of(**own), of())


@pytest.mark.long
def test_a_mesh_gives_the_same() -> None:
    more = {"n_experts": 2, "experts_per_token": 1}
    model = model_config(prediction_module=True, positions="rope", n_layers=1, **more)
    keys = {"microbatch_size": 8, "drop_rate": 0.2, "documents": "separate"}
    run = RunConfig(model, train_config(objective="multi_token", **keys))
    tokens = np.random.default_rng(0).integers(0, 32, (1, 8, 9), np.int32)
    starts = np.where(np.arange(8) < 5, 0, 5).astype(np.int32)
    batch = Batch(tokens[..., :-1], tokens[..., 1:], np.broadcast_to(starts, (1, 8, 8)).copy())
    check = ParallelCheck(run, [batch], 2, None)
    one = check.train(ParallelCase("dp", 1, 1, 1, 8, False))
    other = check.train(ParallelCase("cp", 2, 2, 2, 4, False), one.gradient)
    assert np.abs(one.gradient["prediction.projection.kernel"]).max() > 1e-5
    assert not any(compare(other, one).exceeds)

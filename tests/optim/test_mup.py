"""muP: initial sizes, updates, logits and scores as the paper's table 8 has them; models of other
widths; the best learning rate between those tried."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig, MupConfig
from rungs.config.run_config import RunConfig
from rungs.model.gpt import GPT
from rungs.parallel.sharding import one_device
from rungs.planning.mup import WidthMeasurement, fit_growth, with_width
from rungs.step.state import create_model_and_optimizer, named_arrays
from tests.support.configs import model_config, train_config
from tests.support.tiny_model import bind_and_jit, random_model

WIDE: dict[str, Any] = {"emb_dim": 128, "n_heads": 4, "vocab_size": 600}
EXPERTS = {"n_experts": 3, "experts_per_token": 2}


def mup_config(base: int = 32, **changes: Any) -> ModelConfig:
    return model_config(**{**WIDE, "mup": {"base_emb_dim": base}, **changes})


def weights(model: GPT) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in named_arrays(model).items()}


def moved(config: ModelConfig, **train: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The weights, and by how much a first update moves them; no two gradients are the same."""
    keys = {"warmup_period_percent": 0, "weight_decay": 0, "learning_rate": 1.0, **train}
    run = RunConfig(config, train_config(**keys))
    model, optimizer = create_model_and_optimizer(run, 10, one_device())
    before = weights(model)
    leaves, structure = jax.tree.flatten(nnx.state(model, nnx.Param))
    generator = np.random.default_rng(3)
    draws = [generator.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    optimizer.update(model, jax.tree.unflatten(structure, draws), jnp.asarray(1.0))
    after = weights(model)
    return before, {name: after[name] - before[name] for name in before}


def is_kernel_of_block(name: str) -> bool:
    return name.startswith(("blocks", "prediction")) and name.endswith("kernel")


@pytest.mark.long
def test_a_model_as_wide_as_its_base_is_the_model_without_the_key() -> None:
    for one, other in zip(moved(mup_config(128)), moved(model_config(**WIDE)), strict=True):
        assert all((one[name] == array).all() for name, array in other.items())
    tokens = jnp.arange(8)[None]
    wide, plain = (
        GPT(config, jax.random.key(0))(tokens) for config in (mup_config(128), model_config(**WIDE))
    )
    np.testing.assert_array_equal(wide, plain)


@pytest.mark.long
def test_kernels_of_blocks_start_smaller_by_the_root_of_the_width() -> None:
    more = EXPERTS | {"prediction_module": True}
    wide = weights(GPT(mup_config(32, **more), jax.random.key(0)))
    plain = weights(GPT(model_config(**WIDE, **more), jax.random.key(0)))
    for name, array in plain.items():
        hidden = 1 / 4 if "router" in name else 1 / 2
        factor = hidden if is_kernel_of_block(name) else 1
        np.testing.assert_allclose(wide[name], factor * array, rtol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "hidden", "changes"),
    [("adamw", 4.0, EXPERTS), ("muon", 2.0, {"prediction_module": True})],
)
def test_kernels_of_blocks_learn_slower_by_the_width_or_in_muon_its_root(
    optimizer: str, hidden: float, changes: dict[str, Any]
) -> None:
    _, wide = moved(mup_config(32, **changes), optimizer=optimizer)
    _, plain = moved(model_config(**WIDE, **changes), optimizer=optimizer)
    for name, array in plain.items():
        slower = 4.0 if "router" in name else hidden if is_kernel_of_block(name) else 1.0
        np.testing.assert_allclose(slower * wide[name], array, rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_weight_decay_is_the_same_at_every_width() -> None:
    keys = {"optimizer": "muon", "learning_rate": 1.0}
    before, with_decay = moved(mup_config(32), weight_decay=0.5, **keys)
    _, without = moved(mup_config(32), **keys)
    name = "blocks.feed_forward.up.kernel"
    decay = with_decay[name] - without[name]
    np.testing.assert_allclose(decay, -0.5 * before[name], atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_divided_by_the_width_in_loss_and_output(tied: bool) -> None:
    keys = WIDE | {"n_layers": 1, "tied_embeddings": tied}
    wide, plain = random_model(**keys, mup={"base_emb_dim": 32}), random_model(**keys)
    tokens, targets = np.arange(8)[None], np.arange(1, 9)[None]
    logits = np.array(bind_and_jit(GPT.__call__, plain)(tokens), np.float64) / 4
    own = np.take_along_axis(logits, targets[..., None], -1).sum()
    loss = np.log(np.exp(logits).sum(-1)).sum() - own
    found, (summed, _) = bind_and_jit(
        lambda model, *given: (model(given[0]), model.summed_loss(*given)), wide
    )(tokens, targets)
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-7)
    assert float(summed) == pytest.approx(loss, rel=1e-6)


def test_scores_fall_with_the_width_of_heads_that_are_wider_than_the_bases() -> None:
    config = mup_config(32, mup={"base_emb_dim": 32, "base_head_dim": 8})
    assert config.head_width == 32
    assert config.attention_scale == pytest.approx(math.sqrt(8) / 32)
    assert mup_config(32).attention_scale == pytest.approx(1 / math.sqrt(32))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"init": "truncated_normal"}, 'mup: needs init "gpt2"'),
        ({"embedding_scale": "sqrt_emb_dim"}, 'mup: needs embedding_scale "none"'),
        (
            {"mup": {"base_emb_dim": 32, "base_head_dim": 8}, "query_pre_attn_scalar": 8},
            "mup: base_head_dim and query_pre_attn_scalar both",
        ),
    ],
)
def test_settings_that_conflict_with_mup_are_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        mup_config(**changes)


def test_a_wider_model_has_more_heads_or_wider_ones() -> None:
    model = model_config(emb_dim=64, n_heads=4, n_kv_heads=2, ffn_dim=96)
    wide = with_width(model, 96)
    assert (wide.n_heads, wide.n_kv_heads, wide.head_width, wide.ffn_dim) == (6, 3, 16, 144)
    mup = MupConfig(base_emb_dim=64, base_head_dim=16)
    wide = with_width(model.model_copy(update={"mup": mup}), 96)
    assert (wide.n_heads, wide.n_kv_heads, wide.head_width, wide.ffn_dim) == (4, 2, 24, 144)
    assert with_width(model, 64).as_json() == {**model.as_json(), "head_dim": 16}
    with pytest.raises(UserError, match=r"width 80: n_kv_heads 2 .* multiples of 32"):
        with_width(model, 80)
    sines = model_config(emb_dim=64, n_layers=0, positions="sinusoidal")
    with pytest.raises(UserError, match="width 63: emb_dim: 63 is odd"):
        with_width(sines, 63)
    with pytest.raises(UserError, match="width 99999999999999999999: "):
        with_width(sines, 99999999999999999999)


def test_growth_is_the_power_of_the_width_and_nan_is_off() -> None:
    def measured(width: int) -> WidthMeasurement:
        sizes = {"steady": 3.0, "large": width**0.75, "broken": math.nan, "logits": width**-0.5}
        changes = {"steady": 2.0, "large": 5 / width, "broken": 1.0, "logits": 0.1}
        return WidthMeasurement(width, sizes, changes)

    steady, large, broken, logits = fit_growth([measured(width) for width in (64, 128, 512)])
    assert steady == ("steady", pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9))
    assert large == ("large", pytest.approx(0.75), pytest.approx(-1))
    assert (steady.is_off, large.is_off, broken.is_off) == (False, True, True)
    assert not logits.is_off  # as muP's initial logits
    assert logits._replace(place="layer 1").is_off
    assert logits._replace(of_change=-0.5).is_off
    assert logits._replace(of_size=0.5).is_off

"""Position embeddings and rotary positions, compared with the papers' formulas."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rungs.config.model_config import LayerKind, ModelConfig, RopeScaling
from rungs.model.positions import Rotary, rotary_for, rotary_frequencies, scale_frequencies
from tests.support.configs import model_config

LLAMA_3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_context_length": 8192,
}
YARN = LLAMA_3 | {"type": "yarn", "high_frequency_factor": 32.0, "attention_factor": 1.2}
SCALINGS = {
    "plain": {},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA_3},
}


def rope_config(**changes: Any) -> ModelConfig:
    """Heads of 128 elements, as Llama 3 has them."""
    llama_3 = {"positions": "rope", "head_dim": 128, "rope_theta": 500_000.0}
    return model_config(**llama_3 | changes)


def rotary(architecture: ModelConfig, *positions: float, kind: LayerKind = "global") -> Rotary:
    found = rotary_for(architecture, kind, jnp.asarray(positions))
    assert found is not None
    return found


def random_heads(*shape: int) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(3).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_scores_depend_on_distance_only(scaling: str) -> None:
    architecture = rope_config(**SCALINGS[scaling])
    query_NH, key_NH = random_heads(2, 3, 128)

    def scores_N(query_position: int, key_position: int) -> np.ndarray:
        rotated = rotary(architecture, query_position, key_position)(jnp.stack([query_NH, key_NH]))
        return np.asarray((rotated[0] * rotated[1]).sum(axis=-1))

    for distance in (0, 1, 7, 300):
        expected = scores_N(distance, 0)
        for start in (1, 50, 2000):
            # an angle of 2,000 radians is rounded by up to 6e-5, each score sums 128 products
            np.testing.assert_allclose(scores_N(start + distance, start), expected, atol=5e-3)
        for other in (scores_N(distance + 1, 0), scores_N(0, distance + 1)):
            assert np.abs(expected - other).max() > 0.1


def test_rotation_keeps_lengths_and_leaves_position_0_unchanged() -> None:
    x_SNH = random_heads(5, 3, 128)
    rotated = rotary(rope_config(), 0, 1, 2, 3, 1000)(x_SNH)
    np.testing.assert_array_equal(rotated[0], x_SNH[0])
    assert not np.isclose(rotated[1:], x_SNH[1:]).all(axis=-1).any()
    np.testing.assert_allclose(
        jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(x_SNH, axis=-1), rtol=1e-6
    )


def test_each_row_of_a_batch_has_its_own_positions() -> None:
    x_BSNH = random_heads(2, 4, 3, 128)
    positions_BS = jnp.asarray([[0, 1, 2, 3], [0, 0, 0, 1]])
    found = rotary_for(rope_config(), "global", positions_BS)
    assert found is not None
    for row, positions in enumerate(positions_BS.tolist()):
        expected = rotary(rope_config(), *positions)(x_BSNH[row])
        np.testing.assert_allclose(found(x_BSNH)[row], expected, rtol=1e-6, atol=1e-6)


def test_rotation_is_computed_in_float32_and_rounded_once() -> None:
    x_SNH = random_heads(2, 3, 128).astype(jnp.bfloat16)
    rotate = rotary(rope_config(), 500, 1001)
    exact = rotate(x_SNH.astype(jnp.float32))
    assert rotate(x_SNH).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotate(x_SNH), exact.astype(jnp.bfloat16))


def test_frequencies_fall_geometrically_from_1() -> None:
    found = rotary_frequencies(rope_config(), "global")
    expected = [500_000 ** (-2 * pair / 128) for pair in range(64)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_linear_scaling_divides_positions_by_the_factor() -> None:
    architecture = rope_config(**SCALINGS["linear"])
    x_SNH = random_heads(3, 2, 128)
    stretched, plain = rotary(architecture, 4, 40, 400), rotary(rope_config(), 1, 10, 100)
    np.testing.assert_allclose(stretched(x_SNH), plain(x_SNH), atol=1e-4)


def test_llama3_scaling_has_three_regimes() -> None:
    plain = rotary_frequencies(rope_config(), "global")
    found = rotary_frequencies(rope_config(rope_scaling=LLAMA_3), "global")
    wavelengths = 2 * math.pi / plain
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    between = ~fast & ~slow
    assert [regime.sum() for regime in (fast, between, slow)] == [29, 6, 29]
    np.testing.assert_allclose(found[fast], plain[fast], rtol=1e-12)
    np.testing.assert_allclose(found[slow], plain[slow] / 8, rtol=1e-12)
    smooth = (8192 / wavelengths[between] - 1) / (4 - 1)
    expected = (1 - smooth) * plain[between] / 8 + smooth * plain[between]
    np.testing.assert_allclose(found[between], expected, rtol=1e-12)
    assert (np.diff(found) < 0).all()


def test_llama3_scaling_is_continuous_between_regimes() -> None:
    scaling = RopeScaling.model_validate(LLAMA_3)
    for bound, ratio in ((8192 / 4, 1.0), (8192 / 1, 1 / 8)):
        around = 2 * math.pi / (bound * np.array([1 - 1e-9, 1, 1 + 1e-9]))
        np.testing.assert_allclose(
            scale_frequencies(around, scaling, 10_000.0) / around, ratio, rtol=1e-8
        )


def test_yarn_scales_pairs_in_a_ramp_and_lengthens_rotated_heads() -> None:
    """OLMo 3's numbers; transformers 5.23 has these bounds."""
    plain = rotary_frequencies(rope_config(), "global")
    architecture = rope_config(rope_scaling=YARN)
    ratio = rotary_frequencies(architecture, "global") / plain
    first, last = 18, 35  # 128 · ln(8192 ÷ 2π · 32) ÷ (2 · ln 500,000) = 18.08, and 34.98
    np.testing.assert_allclose(ratio[: first + 1], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[last:], 1 / 8, rtol=1e-12)
    ramp = (np.arange(first, last + 1) - first) / (last - first)
    np.testing.assert_allclose(ratio[first : last + 1], 1 - ramp * 7 / 8, rtol=1e-12)
    x_SNH = random_heads(3, 2, 128)
    lengths = jnp.linalg.norm(rotary(architecture, 0, 7, 5000)(x_SNH), axis=-1)
    np.testing.assert_allclose(lengths, 1.2 * jnp.linalg.norm(x_SNH, axis=-1), rtol=1e-5)


def test_yarn_leaves_sliding_layers_with_their_own_base_alone() -> None:
    keys = {"rope_scaling": YARN, "sliding_window": 4}
    shared, own = rope_config(**keys), rope_config(**keys, sliding_rope_theta=500_000.0)
    x_SNH = random_heads(2, 2, 128)
    for architecture, factor in ((shared, 1.2), (own, 1.0)):
        rotated = rotary(architecture, 3, 4, kind="sliding")(x_SNH)
        lengths = jnp.linalg.norm(rotated, axis=-1)
        np.testing.assert_allclose(lengths, factor * jnp.linalg.norm(x_SNH, axis=-1), rtol=1e-5)


def test_sliding_layers_may_have_their_own_base_which_is_never_scaled() -> None:
    keys = {"sliding_window": 4, "rope_scaling": {"type": "linear", "factor": 8.0}}
    own = rope_config(**keys, sliding_rope_theta=10_000.0)
    shared = rope_config(**keys)
    in_global = rotary_frequencies(rope_config(), "global") / 8
    np.testing.assert_array_equal(rotary_frequencies(own, "global"), in_global)
    np.testing.assert_array_equal(rotary_frequencies(shared, "global"), in_global)
    np.testing.assert_array_equal(rotary_frequencies(shared, "sliding"), in_global)
    plain = rotary_frequencies(rope_config(rope_theta=10_000.0), "global")
    np.testing.assert_array_equal(rotary_frequencies(own, "sliding"), plain)


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal"])
def test_other_positions_rotate_nothing(positions: str) -> None:
    assert rotary_for(model_config(positions=positions), "global", jnp.arange(3)) is None

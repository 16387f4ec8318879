"""The checkup of a model: what is sound passes, and each fault fails the check that is for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig, load_run
from rungs.data.loader import Batch, TrainingData
from rungs.diagnostics.model_check import subject
from rungs.diagnostics.model_check.checks import CheckResult, findings
from rungs.diagnostics.model_check.subject import CheckLimits, Patient
from rungs.model import attention, feed_forward, generation, layers
from rungs.model.attention import Cache
from rungs.model.gpt import GPT
from rungs.model.layers import LayerNorm
from rungs.optim import multi_steps
from tests.support.configs import model_config, train_config
from tests.support.sharded_models import quick_compilation
from tests.support.tiny_run import make_dataset, make_run
from tests.training.test_fine_tuning import LORA, imported_run
from tests.training.test_start import files

Fault = Callable[[pytest.MonkeyPatch], None]
LENGTH = 8
LLAMA = {"positions": "rope", "norm": "rms_norm", "n_kv_heads": 1, "feed_forward": "swiglu"}
WINDOWS = LLAMA | {"n_layers": 2, "sliding_window": 3}
NO_LAYERS = {"n_layers": 0, "n_heads": None, "norm": "none"}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quick_compilation():
        yield


class Walks:
    """Data of sequences that repeat with noise, some targets of which may not count."""

    total_steps = 3

    def __init__(self, target_offset: int = 1, ignored: int = 0) -> None:
        self._offset, self._ignored = target_offset, ignored

    def batch(self, step: int) -> Batch:
        steps = np.random.default_rng(step).integers(1, 4, (1, 2, LENGTH + 1))
        walk = (np.cumsum(steps, axis=-1) % 32).astype(np.int32)
        targets = walk[..., self._offset : self._offset + LENGTH].copy()
        targets[..., : self._ignored] = -1
        targets[..., LENGTH - self._ignored :] = -1
        return Batch(walk[..., :LENGTH], targets)


def tiny_patient(data: Walks | None = None, train: Any = None, **model: Any) -> Patient:
    config = RunConfig(
        model_config(emb_dim=32, **model),
        train_config(microbatch_size=2, drop_rate=0.5, **train or {}),
    )
    return subject.of(
        config, cast(TrainingData, data or Walks()), None, CheckLimits(4, LENGTH, 200)
    )


def verdicts(found: Patient) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in findings(found)}


def failed(found: dict[str, CheckResult]) -> set[str]:
    return {check for check, finding in found.items() if finding.passed is False}


SOUND: dict[str, dict[str, Any]] = {
    "gpt2": {"qkv_bias": True},
    "bare": {"positions": "none", "norm": "none", "residual": False, "n_layers": 1},
    "after": {"positions": "sinusoidal", "norm_placement": "after", "init": "truncated_normal"},
    "windows": WINDOWS,
    "gemma": WINDOWS
    | {
        "layer_pattern": ["sliding", "global"],
        "norm": "rms_norm_plus_one",
        "norm_placement": "around",
        "qk_norm": True,
        "attention_soft_cap": 50.0,
        "final_soft_cap": 30.0,
        "tied_embeddings": True,
        "embedding_scale": "sqrt_emb_dim",
    },
    "experts": LLAMA | {"n_experts": 8, "experts_per_token": 2},
    "next-token": NO_LAYERS | {"positions": "none"},
    "positions": NO_LAYERS,
    "single-token windows": LLAMA | {"sliding_window": 1},
    "one-expert": LLAMA | {"n_experts": 1, "experts_per_token": 1},
    "tied table": NO_LAYERS | {"tied_embeddings": True, "norm": "layer_norm"},
}


@pytest.mark.long
@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_passes(name: str) -> None:
    found = verdicts(tiny_patient(**SOUND[name]))
    assert failed(found) == set(), found
    assert all(finding.passed for finding in found.values()), found
    assert list(found) == [
        *("initial loss", "causality", "rows", "gradients"),
        *("finite", "padding", "cache", "overfitting"),
    ]


def see(patch: pytest.MonkeyPatch, mask_of: Callable[[int, int | None], Array]) -> None:
    """What whole sequences see, by their length and window."""

    def masked(
        query: Array, key: Array, value: Array, scale: float, window: int | None, cap: float | None
    ) -> Array:
        mask = mask_of(query.shape[1], window)
        return attention.plain_attention(query, key, value, mask, scale=scale, soft_cap=cap)

    patch.setattr(attention, "causal_attention", masked)


def look_ahead(patch: pytest.MonkeyPatch) -> None:
    see(patch, lambda length, _: jnp.ones((length, length), bool))


def sideways(numbers: Array) -> Array:
    """Vectors that tell numbers, and are no constant that a norm would take away."""
    return numbers[..., None] / 32 * jnp.linspace(0, 1, 32)


def look_ahead_without_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """Every position is told which token comes last."""
    honest = GPT.embed

    def embed(self: GPT, tokens_BS: Array, positions_BS: Array) -> Array:
        return honest(self, tokens_BS, positions_BS) + sideways(tokens_BS[:, -1:])

    patch.setattr(GPT, "embed", embed)


def look_at_nothing(patch: pytest.MonkeyPatch) -> None:
    see(patch, lambda length, _: jnp.eye(length, dtype=bool))


def no_window(patch: pytest.MonkeyPatch) -> None:
    see(patch, lambda length, _: attention.causal_mask(length))


def norm_over_the_batch(patch: pytest.MonkeyPatch) -> None:
    honest = LayerNorm.__call__

    def normed(self: LayerNorm, x_BSD: Array) -> Array:
        return honest(self, x_BSD - x_BSD.mean(axis=0))

    patch.setattr(LayerNorm, "__call__", normed)


def rows_known_without_a_gradient(patch: pytest.MonkeyPatch) -> None:
    honest = GPT.embed

    def embed(self: GPT, tokens_BS: Array, positions_BS: Array) -> Array:
        return honest(self, tokens_BS, positions_BS) + sideways(tokens_BS.mean(axis=0))

    patch.setattr(GPT, "embed", embed)


def detached_feed_forward(patch: pytest.MonkeyPatch) -> None:
    honest = feed_forward.FeedForward.__call__

    def detached(self: Any, x_BSD: Array) -> Any:
        y_BSD, routing = honest(self, x_BSD)
        return jax.lax.stop_gradient(y_BSD), routing

    patch.setattr(feed_forward.FeedForward, "__call__", detached)


def large_start(patch: pytest.MonkeyPatch) -> None:
    honest = layers.scaled_normal

    def large(key: Array, shape: tuple[int, ...], inputs: int, *, scale: float) -> Array:
        return honest(key, shape, inputs, scale=20 * scale)

    patch.setattr(layers, "scaled_normal", large)


def overflow_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    honest = GPT.unembed

    def unembed(self: GPT, x_BSD: Array) -> Array:
        logits_BSV = honest(self, x_BSD)
        return logits_BSV * jnp.inf if x_BSD.dtype == jnp.bfloat16 else logits_BSV

    patch.setattr(GPT, "unembed", unembed)


def every_target_counts(patch: pytest.MonkeyPatch) -> None:
    honest = GPT.summed_loss

    def summed_loss(self: GPT, tokens_BS: Array, targets_BS: Array, *how: Any) -> Any:
        return honest(self, tokens_BS, jnp.maximum(targets_BS, 0), *how)

    patch.setattr(GPT, "summed_loss", summed_loss)


def cache_off_by_one(patch: pytest.MonkeyPatch) -> None:
    honest = Cache.put

    def put(self: Cache, key_BSKH: Array, value_BSKH: Array, first_slot: Array) -> Cache:
        return honest(self, key_BSKH, value_BSKH, jnp.maximum(first_slot - 1, 0))

    patch.setattr(Cache, "put", put)


def padding_is_seen(patch: pytest.MonkeyPatch) -> None:
    honest = generation.cached_views

    def views(config: Any, first_slot: Any, length: int, slots: int, padding_B: Array) -> Any:
        found = honest(config, first_slot, length, slots, padding_B)
        unpadded = honest(config, first_slot, length, slots, jnp.zeros_like(padding_B))
        return {kind: view._replace(mask=unpadded[kind].mask) for kind, view in found.items()}

    patch.setattr(generation, "cached_views", views)


def no_learning_rate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(multi_steps, "learning_rate_schedule", lambda *_: lambda _: jnp.asarray(0.0))


def uphill(patch: pytest.MonkeyPatch) -> None:
    honest = multi_steps.learning_rate_schedule
    patch.setattr(
        multi_steps, "learning_rate_schedule", lambda *of: lambda count: -honest(*of)(count)
    )


BFLOAT16 = {"compute_dtype": "bfloat16"}
FAULTS: list[tuple[Fault, set[str], dict[str, Any], dict[str, Any]]] = [
    (look_ahead, {"causality"}, {}, {}),
    (look_ahead_without_a_gradient, {"causality"}, {}, {}),
    # a softmax of one score has no gradient, and the token alone leaves its successor open
    (look_at_nothing, {"causality", "gradients", "overfitting"}, {}, {}),
    (no_window, {"causality"}, WINDOWS, {}),
    (norm_over_the_batch, {"rows"}, {}, {}),
    (rows_known_without_a_gradient, {"rows"}, {}, {}),
    (detached_feed_forward, {"gradients"}, {}, {}),
    (large_start, {"initial loss"}, {}, {}),
    (overflow_in_bfloat16, {"finite"}, {}, BFLOAT16),
    (every_target_counts, {"padding"}, {}, {}),
    (cache_off_by_one, {"cache"}, {}, {}),
    (padding_is_seen, {"cache"}, {}, {}),
    (no_learning_rate, {"overfitting"}, {}, {}),
    (uphill, {"overfitting"}, {}, {}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "checks", "model", "train"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS]
)
def test_a_fault_fails_the_check_that_is_for_it(
    fault: Fault,
    checks: set[str],
    model: dict[str, Any],
    train: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    found = verdicts(tiny_patient(train=train, **model))
    assert failed(found) == checks, found


def test_targets_that_are_the_inputs_are_told() -> None:
    model = NO_LAYERS | {"positions": "none"}
    found = verdicts(tiny_patient(Walks(target_offset=0), {"target_offset": 0}, **model))
    assert failed(found) == set(), found
    (note,) = found["causality"].notes
    assert "each position sees itself" in note


def test_targets_that_do_not_count_are_left_out() -> None:
    found = verdicts(tiny_patient(Walks(ignored=2)))
    assert failed(found) == set(), found
    assert found["overfitting"].passed


def test_a_single_token_has_little_to_check() -> None:
    data = cast(TrainingData, Walks())
    config = RunConfig(model_config(emb_dim=32), train_config())
    found = verdicts(subject.of(config, data, None, CheckLimits(1, 1, 200)))
    assert {check for check, finding in found.items() if finding.passed is None} == {
        *("rows", "padding", "cache")
    }
    assert failed(found) == set(), found


def test_low_rank_additions_to_other_weights(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = imported_run(tmp_path / "run", lora=LORA)
    before = files(run.path)
    config = load_run(run.path)
    found = verdicts(
        subject.admit(run, config, tmp_path / "datasets", CheckLimits(None, None, 200))
    )
    assert failed(found) == set(), found
    assert found["initial loss"].passed is None
    assert found["gradients"].notes == (
        "A of low-rank additions has none while B is zero, as it is at the start",
    )
    assert files(run.path) == before


def test_what_memory_does_not_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(subject, "memory_bytes", lambda: 1000.0)
    with pytest.raises(UserError, match=r"^.*run: takes about .* GB of memory to examine.*$"):
        subject.admit(run, load_run(run.path), tmp_path / "datasets", CheckLimits(4, 8, 1))


def test_no_target_in_what_is_examined_is_refused() -> None:
    data = cast(TrainingData, Walks(ignored=3))
    with pytest.raises(UserError, match="no target is among the first 2 tokens"):
        subject.of(RunConfig(model_config(), train_config()), data, None, CheckLimits(2, 2, 1))

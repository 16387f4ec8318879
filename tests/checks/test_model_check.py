"""The model check: sound models pass, and each fault fails the check that is meant for it."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from rungs.checks import checked_model
from rungs.checks.causality import Queries, check_rows
from rungs.checks.check import Check, failures
from rungs.checks.checked_model import CheckedModel, check_memory, limits_for
from rungs.checks.model import check_cache, check_padding, checks_of
from rungs.checks.short_run import Limits, ShortRun
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig, load_run
from rungs.data.tokens.loader import Batch, TrainingData
from rungs.model import attention, feed_forward, layers
from rungs.model.attention import Cache
from rungs.model.gpt import GPT
from rungs.model.kernels import blockwise_attention
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.optim import skipping_optimizer
from tests.support.configs import model_config, train_config
from tests.support.sharded_models import RECIPE
from tests.support.starting import files
from tests.support.tiny_run import make_dataset, make_run
from tests.training.test_fine_tuning import LORA, imported_run

Fault = Callable[[pytest.MonkeyPatch], None]
LENGTH = 8
LLAMA = {"positions": "rope", "norm": "rms_norm", "n_kv_heads": 1, "feed_forward": "swiglu"}
WINDOWS = LLAMA | {"n_layers": 2, "sliding_window": 3}
NO_LAYERS = {"n_layers": 0, "n_heads": None, "norm": "none"}


class Walks:
    """Data of sequences that repeat with noise. Targets at both ends can be ignored."""

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


def tiny_model(data: Walks | None = None, train: Any = None, **model: Any) -> CheckedModel:
    config = RunConfig(
        model_config(emb_dim=32, **model),
        train_config(microbatch_size=2, drop_rate=0.5, **train or {}),
    )
    return of_data(config, data or Walks(), 4, LENGTH)


def of_data(config: RunConfig, data: Walks, sequences: int, tokens: int) -> CheckedModel:
    limits = Limits(1, sequences, tokens)
    return CheckedModel.of(ShortRun.of_data(config, cast(TrainingData, data), limits), 200)


def results_of(checked: CheckedModel) -> dict[str, Check]:
    return {check.name: check for check in checks_of(checked)}


def failed(results: dict[str, Check]) -> set[str]:
    return {check.name for check in failures(results.values())}


SOUND: dict[str, dict[str, Any]] = {
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
    "recipe": RECIPE | {"zero_init_residual": True, "n_layers": 4},
}


@pytest.mark.long
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_passes(name: str) -> None:
    results = results_of(tiny_model(**SOUND[name]))
    assert failed(results) == set(), results
    assert all(result.passed for result in results.values()), results
    assert list(results) == [
        *("initial loss", "causality", "rows", "gradients"),
        *("finite", "padding", "cache", "overfitting"),
    ]


def replace_mask(patch: pytest.MonkeyPatch, mask_of: Callable[[int, int | None], Array]) -> None:
    """Replace the attention mask by one that depends on sequence length and window."""

    def masked(query: Array, key: Array, value: Array, scoring: Scoring) -> Array:
        assert scoring.starts_BS is None
        mask = mask_of(query.shape[1], scoring.window)
        scale, cap = scoring.scale, scoring.soft_cap
        return attention.plain_attention(query, key, value, mask, scale=scale, soft_cap=cap)

    patch.setattr(blockwise_attention, "causal_attention", masked)


def as_vectors(numbers: Array) -> Array:
    """Encode numbers as vectors that a norm does not remove."""
    return numbers[..., None] / 32 * jnp.linspace(0, 1, 32)


def look_ahead_without_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """Tell every position the last token."""
    original = GPT.embed

    def embed(self: GPT, tokens_BS: Array, positions_BS: Array) -> Array:
        return original(self, tokens_BS, positions_BS) + as_vectors(tokens_BS[:, -1:])

    patch.setattr(GPT, "embed", embed)


def look_at_nothing(patch: pytest.MonkeyPatch) -> None:
    replace_mask(patch, lambda length, _: jnp.eye(length, dtype=bool))


def no_window(patch: pytest.MonkeyPatch) -> None:
    replace_mask(patch, lambda length, _: attention.causal_mask(length))


def rows_known_without_a_gradient(patch: pytest.MonkeyPatch) -> None:
    original = GPT.embed

    def embed(self: GPT, tokens_BS: Array, positions_BS: Array) -> Array:
        return original(self, tokens_BS, positions_BS) + as_vectors(tokens_BS.mean(axis=0))

    patch.setattr(GPT, "embed", embed)


def detached_feed_forward(patch: pytest.MonkeyPatch) -> None:
    original = feed_forward.FeedForward.__call__

    def detached(self: Any, x_BSD: Array) -> Any:
        y_BSD, routing = original(self, x_BSD)
        return jax.lax.stop_gradient(y_BSD), routing

    patch.setattr(feed_forward.FeedForward, "__call__", detached)


def large_start(patch: pytest.MonkeyPatch) -> None:
    original = layers.scaled_normal

    def large(key: Array, shape: tuple[int, ...], inputs: int, *, scale: float) -> Array:
        return original(key, shape, inputs, scale=20 * scale)

    patch.setattr(layers, "scaled_normal", large)


def overflow_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    original = GPT.unembed

    def unembed(self: GPT, x_BSD: Array) -> Array:
        logits_BSV = original(self, x_BSD)
        return logits_BSV * jnp.inf if x_BSD.dtype == jnp.bfloat16 else logits_BSV

    patch.setattr(GPT, "unembed", unembed)


def every_target_counts(patch: pytest.MonkeyPatch) -> None:
    original = GPT.summed_loss

    def summed_loss(self: GPT, tokens_BS: Array, targets_BS: Array, *how: Any) -> Any:
        return original(self, tokens_BS, jnp.maximum(targets_BS, 0), *how)

    patch.setattr(GPT, "summed_loss", summed_loss)


def cache_off_by_one(patch: pytest.MonkeyPatch) -> None:
    original = Cache.update

    def update(self: Cache, key_BSKH: Array, value_BSKH: Array, first_slot: Array) -> Cache:
        return original(self, key_BSKH, value_BSKH, jnp.maximum(first_slot - 1, 0))

    patch.setattr(Cache, "update", update)


def no_learning_rate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        skipping_optimizer, "learning_rate_schedule", lambda *_: lambda _: jnp.asarray(0.0)
    )


BFLOAT16 = {"compute_dtype": "bfloat16"}
FAULTS: list[tuple[Fault, set[str], dict[str, Any], dict[str, Any]]] = [
    (look_ahead_without_a_gradient, {"causality"}, {}, {}),
    # a softmax of one score has no gradient, and one token does not determine the next
    (look_at_nothing, {"causality", "gradients", "overfitting"}, {}, {}),
    (no_window, {"causality"}, WINDOWS, {}),
    (rows_known_without_a_gradient, {"rows"}, {}, {}),
    (detached_feed_forward, {"gradients"}, {}, {}),
    (large_start, {"initial loss"}, {}, {}),
    (overflow_in_bfloat16, {"finite"}, {}, BFLOAT16),
    (every_target_counts, {"padding"}, {}, {}),
    (cache_off_by_one, {"cache"}, {}, {}),
    (no_learning_rate, {"overfitting"}, {}, {}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "checks", "model", "train"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS]
)
def test_a_fault_fails_its_check(
    fault: Fault,
    checks: set[str],
    model: dict[str, Any],
    train: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks before and between those that are meant pass; the later ones are not run."""
    fault(monkeypatch)
    results, found = checks_of(tiny_model(train=train, **model)), set[str]()
    while found < checks:
        found |= {check.name for check in failures([next(results)])}
    assert found == checks


@jax.custom_vjp
def infinite_gradient(x: Array) -> Array:
    return x


infinite_gradient.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.inf,))


@pytest.mark.long
def test_a_gradient_that_overflows_while_the_loss_is_finite_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = GPT.summed_loss

    def summed_loss(self: GPT, *of: Any) -> Any:
        loss, routing = original(self, *of)
        return infinite_gradient(loss), routing

    monkeypatch.setattr(GPT, "summed_loss", summed_loss)
    results = {check.name: check for check in itertools.islice(checks_of(tiny_model()), 5)}
    assert results["initial loss"].passed
    assert failed(results) == {"finite"}


@pytest.mark.long
def test_a_note_says_that_targets_are_the_inputs() -> None:
    model = NO_LAYERS | {"positions": "none"}
    results = results_of(tiny_model(Walks(target_offset=0), {"target_offset": 0}, **model))
    assert failed(results) == set(), results
    (note,) = results["causality"].notes
    assert "each position sees itself" in note


@pytest.mark.long
def test_a_bidirectional_model_passes_what_applies_to_it() -> None:
    keys = {"objective": "masked_diffusion", "target_offset": 0}
    results = results_of(tiny_model(Walks(target_offset=0), keys, bidirectional=True))
    assert failed(results) == set(), results
    skipped = [name for name, check in results.items() if check.value == "skipped"]
    assert skipped == ["causality", "padding", "cache"]


@pytest.mark.long
def test_a_prediction_module_passes_with_the_objective_that_trains_it() -> None:
    results = results_of(tiny_model(None, {"objective": "multi_token"}, prediction_module=True))
    assert failed(results) == set(), results


def test_a_single_token_skips_three_checks() -> None:
    config = RunConfig(model_config(emb_dim=32, **NO_LAYERS), train_config())
    checked = of_data(config, Walks(), 1, 1)
    unused: Any = None
    rows = check_rows(checked, unused, Queries.spread_over(1, 1), unused)
    for check in (rows, check_padding(checked), check_cache(checked, unused)):
        assert (check.value, check.passed) == ("skipped", None)


@pytest.mark.long
def test_lora_on_imported_weights(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = imported_run(tmp_path / "run", lora=LORA)
    before = files(run.path)
    config = load_run(run.path)
    limits = limits_for(config, None, None)
    short = ShortRun.of(run, config, tmp_path / "datasets", limits)
    results = results_of(CheckedModel.of(short, 200))
    assert failed(results) == set(), results
    assert results["initial loss"].passed is None
    assert results["gradients"].notes == (
        "LoRA's A has no gradient while B is zero, as it is at the start",
    )
    assert files(run.path) == before


def test_a_model_too_large_for_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(checked_model, "memory_bytes", lambda: 1000.0)
    with pytest.raises(UserError, match=r"^.*run: the check needs about .* GB of memory.*$"):
        check_memory(run, load_run(run.path))


def test_a_batch_without_targets_is_refused() -> None:
    with pytest.raises(UserError, match="no target among the first 2 tokens"):
        of_data(RunConfig(model_config(), train_config()), Walks(ignored=3), 2, 2)

"""The eight checks of a model before training, and the table that shows them.

Checks that compare values that should be equal allow for rounding. Gradients that should not exist
must be exactly zero. Axes as in `rungs/model/gpt.py`.
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.pair_sequences import IGNORED
from rungs.diagnostics.model_check import input_gradients
from rungs.diagnostics.model_check.checked_model import CheckedModel
from rungs.diagnostics.model_check.dead_parameters import CheckedBatch, find_dead_parameters
from rungs.diagnostics.model_check.input_gradients import Queries
from rungs.diagnostics.model_check.reachable_loss import (
    frequency_loss,
    guaranteed_window,
    reachable_loss,
)
from rungs.model.blocks import Compute
from rungs.model.feed_forward import Routing
from rungs.model.generation import Generator
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.optim.precision import dtype_of
from rungs.parallel.mesh import one_device
from rungs.parallel.names import dotted
from rungs.parallel.sharding import Layout, place_batch
from rungs.step.gradients import Summed, summed_gradients
from rungs.step.next_token import NextToken
from rungs.step.nonfinite import ALL_FINITE
from rungs.step.state import named_arrays
from rungs.step.train_step import make_train_step

ROUNDING = 1e-5
"""Largest difference of values that should be equal, relative to the largest logit or the norm of
the gradient. The same program computes the same bits for the same rows, but a mixture of experts
sorts tokens of other rows between them. A float32 is rounded by up to 6e-8 of its value."""
CACHE_ROUNDING = 1e-4
"""The same for generation with a cache, where matmuls have other shapes and sum in another order:
at most 2e-6 in the committed runs, more in deeper models."""
LOSS_MARGIN = 0.1
"""Nats above the lowest loss that is possible on one batch. A token then has a probability of
90%."""
MIN_PROGRESS = 0.1
"""Share of the way to the lowest possible loss, for a training that cannot reach it."""
MAX_CACHED_TOKENS = 8
GPT2_INIT_STD = 0.02
_ROW = "{:14} {:7} {}"
_INDENT = " " * 23


class CheckResult(NamedTuple):
    """Result of a check."""

    check: str
    measured: str
    expected: str
    passed: bool | None
    """None if it was skipped."""
    notes: tuple[str, ...] = ()


class Gradient(NamedTuple):
    """Gradient of a batch, in the run's own `compute_dtype`."""

    arrays: dict[str, np.ndarray]
    """By parameter name."""
    is_finite: bool
    routing: Routing | None


LogitsOf = Callable[[np.ndarray], Array]


def run_checks(path: Path, config: RunConfig, checked: CheckedModel) -> list[str]:
    """Run all checks and print a table, each row as soon as it is known.

    Args:
        path: of the run.
        config: of the run.

    Returns:
        The names of the checks that failed.
    """
    print(*_header(path, config, checked), sep="\n", flush=True)
    start = time.perf_counter()
    results = []
    for result in check_results(checked):
        print(*_lines(result), sep="\n", flush=True)
        results.append(result)
    failed = [result.check for result in results if result.passed is False]
    seconds = time.perf_counter() - start
    print(f"\n{len(results)} checks in {seconds:.0f} s; failed: {', '.join(failed) or 'none'}")
    return failed


def _header(path: Path, config: RunConfig, checked: CheckedModel) -> Iterator[str]:
    sequences, tokens = checked.inputs_BS.shape
    weights = checked.start_weights
    origin = "fresh weights" if weights is None else f"the weights of {weights.path}"
    length = config.sequence_length
    yield f"{path}: the first {sequences} sequences, {tokens:,} of their {length:,} tokens, with"
    yield f"{origin}, without dropout, on one CPU device."


def _lines(result: CheckResult) -> Iterator[str]:
    verdict = {True: "ok", False: "FAILED", None: "skipped"}[result.passed]
    yield _ROW.format(result.check, verdict, result.measured)
    yield f"{_INDENT}expected: {result.expected}"
    yield from (_INDENT + note for note in result.notes)


def check_results(checked: CheckedModel) -> Iterator[CheckResult]:
    """Run the checks in order and yield each result. The last check trains the model."""
    logits_of = checked.compiled(lambda model, tokens_BS: model(tokens_BS))
    yield check_initial_loss(checked, np.asarray(logits_of(checked.inputs_BS)))
    queries = Queries.spread_over(*checked.inputs_BS.shape)
    influence_QBS = np.asarray(
        checked.compiled(input_gradients.influence_on_logits)(checked.inputs_BS, *queries)
    )
    causality = check_causality(checked, logits_of, queries, influence_QBS)
    yield causality
    rows = check_rows(checked, logits_of, queries, influence_QBS)
    yield rows
    gradient = gradient_of(checked, checked.config.train)(checked.inputs_BS, checked.targets_BS)
    yield check_gradients(checked, gradient)
    finite = check_finite(checked, gradient)
    yield finite
    # these two would fail for the same reason
    failed = [result.check for result in (causality, rows, finite) if result.passed is False]
    if failed:
        for name in ("padding", "cache"):
            yield _skip(name, f"{' and '.join(failed)} must pass first")
    else:
        yield check_padding(checked)
        yield check_cache(checked, logits_of)
    yield check_overfitting(checked)


def _skip(name: str, reason: str) -> CheckResult:
    return CheckResult(name, "–", reason, None)


def check_initial_loss(checked: CheckedModel, logits_BSV: np.ndarray) -> CheckResult:
    """Check that fresh weights give all tokens about the same probability."""
    model, targets_BS = checked.config.model, checked.targets_BS
    counts_BS = targets_BS != IGNORED
    losses_BS = np.asarray(target_losses(jnp.asarray(logits_BSV), jnp.asarray(targets_BS)))
    loss = float(losses_BS[counts_BS].mean())
    uniform = f"ln {model.vocab_size:,} = {math.log(model.vocab_size):.3f}"
    if checked.start_weights is not None:
        expected = f"only known for fresh weights: {uniform}"
        return CheckResult("initial loss", f"{loss:.3f}", expected, None)
    lead = _lead_of_input_token(model, logits_BSV, checked.inputs_BS)
    repeated = float((targets_BS == checked.inputs_BS)[counts_BS].mean())
    std = _logit_std(model)
    slack = 0.1 + 4 * std / math.sqrt(counts_BS.sum())
    least = math.log(model.vocab_size) - repeated * lead - slack
    most = math.log(model.vocab_size - 1 + math.exp(lead)) + std**2 / 2 + slack
    expected = f"{least:.2f} to {most:.2f} ({uniform})"
    return CheckResult("initial loss", f"{loss:.3f}", expected, least <= loss <= most)


def _logit_std(model: ModelConfig) -> float:
    """Return an upper bound for the standard deviation of fresh logits: that of a normalized vector
    times a random row. Such logits raise the loss by half their variance."""
    if model.init == "truncated_normal":
        return math.sqrt(2 * model.emb_dim / (model.emb_dim + model.vocab_size))
    return GPT2_INIT_STD * math.sqrt(model.emb_dim)


def _lead_of_input_token(
    model: ModelConfig, logits_BSV: np.ndarray, inputs_BS: np.ndarray
) -> float:
    """Return how far the logit of the input token is above the others. With tied embeddings it is,
    by at most the norm of a normalized vector times that of a row."""
    if not model.tied_embeddings:
        return 0.0
    own_BS = np.take_along_axis(logits_BSV, inputs_BS[..., None], axis=-1)[..., 0]
    lead = float((own_BS - logits_BSV.mean(axis=-1)).mean())
    return min(max(lead, 0.0), _logit_std(model) * math.sqrt(model.emb_dim))


def check_causality(
    checked: CheckedModel, logits_of: LogitsOf, queries: Queries, influence_QBS: np.ndarray
) -> CheckResult:
    """Check that a position depends on itself, on all earlier ones within the attention window,
    and on nothing else."""
    model = checked.config.model
    own_QS = influence_QBS[np.arange(len(queries.row_Q)), queries.row_Q]
    distance_QS = queries.position_Q[:, None] - np.arange(own_QS.shape[-1])
    window = guaranteed_window(model) if model.n_layers else 1
    visible = own_QS[(distance_QS >= 0) & (distance_QS < window)]
    later = float(own_QS[distance_QS < 0].max(initial=0))
    beyond_window, notes = _influence_beyond_windows(checked, queries)
    moved = _moved_by_later_tokens(checked, logits_of)
    beyond = f", beyond the window {beyond_window:.1g}" if notes else ""
    if checked.config.train.target_offset == 0:
        notes += ("the targets are the inputs: it is enough that each position sees itself",)
    what = "own" if window == 1 else "own and earlier"
    return CheckResult(
        "causality",
        f"gradient of later tokens {later:.1g}, {what} {visible.min():.1g} to"
        f" {visible.max():.1g}{beyond}; changing later tokens moves logits by {moved:.1g}",
        f"0, {what} above 0; logits at most {ROUNDING:.0e}",
        later == 0 and beyond_window == 0 and bool(visible.min() > 0) and moved <= ROUNDING,
        notes,
    )


def _influence_beyond_windows(
    checked: CheckedModel, queries: Queries
) -> tuple[float, tuple[str, ...]]:
    """Return the largest influence of positions that no window up to a layer reaches, and a note
    that says how far back the windows reach."""
    model, length = checked.config.model, checked.inputs_BS.shape[-1]
    reaches: list[int] = []
    for layer, kind in enumerate(model.layer_kinds()):
        steps = (layer + 1) * ((model.sliding_window or length) - 1)
        if kind == "global" or steps >= length - 1:
            break
        reaches.append(steps)
    if not reaches:
        return 0.0, ()
    influence_LQBS = np.asarray(
        checked.compiled(input_gradients.influence_on_layers)(checked.inputs_BS, *queries)
    )
    distance_QS = queries.position_Q[:, None] - np.arange(length)
    largest = max(
        float(influence_LQBS[layer].sum(axis=1)[distance_QS > steps].max())
        for layer, steps in enumerate(reaches)
    )
    layers = ", ".join(f"layer {layer}: {steps}" for layer, steps in enumerate(reaches))
    return largest, (f"positions that windows reach back, up to {layers}",)


def _moved_by_later_tokens(checked: CheckedModel, logits_of: LogitsOf) -> float:
    """Return how far logits move if later tokens change."""
    inputs_BS = checked.inputs_BS
    half = inputs_BS.shape[-1] // 2
    changed_BS = _change_tokens(checked, np.arange(inputs_BS.shape[-1]) >= half)
    return _difference(logits_of(changed_BS)[:, :half], logits_of(inputs_BS)[:, :half])


def check_rows(
    checked: CheckedModel, logits_of: LogitsOf, queries: Queries, influence_QBS: np.ndarray
) -> CheckResult:
    """Check that the sequences of a batch do not affect each other."""
    count = len(checked.inputs_BS)
    if count == 1:
        return _skip("rows", "there is only one sequence")
    is_other_QB = queries.row_Q[:, None] != np.arange(count)
    others = float(influence_QBS[is_other_QB].max())
    is_odd_B = np.arange(count) % 2 == 1
    before = logits_of(checked.inputs_BS)
    moved = max(
        _difference(
            logits_of(_change_tokens(checked, changed_B[:, None]))[~changed_B], before[~changed_B]
        )
        for changed_B in (is_odd_B, ~is_odd_B)
    )
    return CheckResult(
        "rows",
        f"gradient of other rows {others:.1g}; changing their tokens moves logits by {moved:.1g}",
        f"0; at most {ROUNDING:.0e}",
        others == 0 and moved <= ROUNDING,
    )


def _change_tokens(checked: CheckedModel, mask: np.ndarray) -> np.ndarray:
    """Return the inputs with other tokens where the mask is true."""
    other_BS = (checked.inputs_BS + 1) % checked.config.model.vocab_size
    return np.where(mask, other_BS, checked.inputs_BS)


def _difference(found: Array | np.ndarray, expected: Array | np.ndarray) -> float:
    """Return the largest difference, relative to the largest expected value."""
    if not expected.size:
        return 0.0
    largest = float(np.abs(np.asarray(expected)).max())
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max()) / (largest or 1)


def gradient_of(
    checked: CheckedModel, train: TrainConfig
) -> Callable[[np.ndarray, np.ndarray], Gradient]:
    """Return a function of inputs_BS and targets_BS that computes a train step's gradient."""
    layout, wrt = Layout.of(None), checked.optimizer.wrt

    def of(model: GPT, *batch_ABS: Array) -> Summed:
        parts = NextToken(train), train, layout, model, wrt, len(batch_ABS[0])
        return summed_gradients(*parts)(batch_ABS, jax.random.key(0), None)

    compiled = checked.compiled(of)

    def gradient(inputs_BS: np.ndarray, targets_BS: np.ndarray) -> Gradient:
        state, aux, first_nonfinite_A = compiled(*checked.in_microbatches(inputs_BS, targets_BS))
        flat = nnx.to_flat_state(state)
        arrays = {dotted(path): np.asarray(variable.get_value()) for path, variable in flat}
        return Gradient(arrays, bool((first_nonfinite_A == ALL_FINITE).all()), aux.routing)

    return gradient


def check_gradients(checked: CheckedModel, gradient: Gradient) -> CheckResult:
    """Check that every trainable parameter receives a gradient."""
    if not gradient.is_finite:
        return _skip("gradients", "finite must pass first")
    routing = gradient.routing
    expert_tokens_LE = None if routing is None else np.asarray(routing.counts_E).sum(axis=0)
    found = find_dead_parameters(
        checked.config.model,
        gradient.arrays,
        {name: np.asarray(array) for name, array in named_arrays(checked.model).items()},
        CheckedBatch(checked.inputs_BS, checked.targets_BS, expert_tokens_LE),
    )
    norm, name = found.smallest
    return CheckResult(
        "gradients",
        f"{found.parts:,} parts, {len(found.dead):,} without a gradient; smallest norm {norm:.0e}"
        f" in {name}",
        "none without",
        not found.dead,
        (*(f"no gradient: {part}" for part in found.dead), *found.exemptions),
    )


def check_finite(checked: CheckedModel, gradient: Gradient) -> CheckResult:
    """Check that nothing overflows in the run's compute dtype."""
    dtype = dtype_of(checked.config.train)
    logits_of = checked.compiled(lambda model, tokens: model(tokens, compute=Compute(dtype)))
    is_finite = bool(np.isfinite(logits_of(checked.inputs_BS)).all())
    return CheckResult(
        "finite",
        f"logits {_yes_or_no(is_finite)}, loss and gradient {_yes_or_no(gradient.is_finite)}",
        f"yes, in {dtype.name}",
        is_finite and gradient.is_finite,
    )


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def check_padding(checked: CheckedModel) -> CheckResult:
    """Check that tokens after the last counted target do not affect the gradient."""
    # the load-balancing loss depends on all tokens, padding included
    train = checked.config.train.model_copy(update={"load_balancing_weight": 0.0})
    last_B1 = _middle_targets(checked.targets_BS)[:, None]
    is_after_BS = np.arange(checked.targets_BS.shape[-1]) > last_B1
    if not is_after_BS.any():
        return _skip("padding", "no token follows a target")
    targets_BS = np.where(is_after_BS, IGNORED, checked.targets_BS)
    gradient = gradient_of(checked, train)
    expected = gradient(checked.inputs_BS, targets_BS).arrays
    found = gradient(_change_tokens(checked, is_after_BS), targets_BS).arrays
    difference = _norm({name: found[name] - array for name, array in expected.items()})
    moved = difference / (_norm(expected) or 1)
    return CheckResult(
        "padding",
        f"changing tokens after the last target moves the gradient by {moved:.1g}",
        f"at most {ROUNDING:.0e}",
        moved <= ROUNDING,
    )


def _middle_targets(targets_BS: np.ndarray) -> np.ndarray:
    """Return for each row the position of the middle one of its counted targets."""
    counted = (np.flatnonzero(targets_S != IGNORED) for targets_S in targets_BS)
    return np.array([positions[len(positions) // 2] for positions in counted])


def _norm(arrays: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in arrays.values()))


def check_cache(checked: CheckedModel, logits_of: LogitsOf) -> CheckResult:
    """Check that generation, with left padding and one token at a time, gives the same logits as
    one forward pass."""
    inputs_BS = checked.inputs_BS
    rows, length = inputs_BS.shape
    lengths = [length - row * length // (2 * rows) for row in range(rows)]
    count = min(MAX_CACHED_TOKENS, min(lengths) - 1)
    if not count:
        return _skip("cache", "there is only one token")
    texts = [row[:end].tolist() for row, end in zip(inputs_BS, lengths, strict=True)]
    found = Generator(checked.model).logits_after(texts, count)
    logits_BSV = np.asarray(logits_of(inputs_BS))
    expected = np.stack(
        [row[end - count - 1 : end] for row, end in zip(logits_BSV, lengths, strict=True)]
    )
    difference = _difference(found, expected)
    return CheckResult(
        "cache",
        f"{count} tokens one at a time: logits differ by {difference:.1g} from one forward pass",
        f"at most {CACHE_ROUNDING:.0e}",
        difference <= CACHE_ROUNDING,
    )


def check_overfitting(checked: CheckedModel) -> CheckResult:
    """Check that training on one batch reaches the loss that the model can reach."""
    losses: list[float] = []
    bound, why = math.inf, ""
    for loss in _train_on_batch(checked):
        if not losses:
            bound, why = _overfitting_bound(checked, loss)
        losses.append(loss)
        if loss <= bound:
            break
    steps = len(losses) - 1
    return CheckResult(
        "overfitting",
        f"{losses[0]:.2f} to {losses[-1]:.2f} in {steps} steps",
        f"at most {bound:.2f}: {why}",
        losses[-1] <= bound,
    )


def _train_on_batch(checked: CheckedModel) -> Iterator[float]:
    """Yield the loss before each step, and after the last."""
    mesh = one_device()
    step = make_train_step(checked.overfitting, mesh)
    batch = place_batch(mesh, *checked.in_microbatches(checked.inputs_BS, checked.targets_BS))
    for _ in range(checked.steps + 1):
        result = step(checked.model, checked.optimizer, *batch)
        yield float(np.average(result.losses_A, weights=result.weights_A))


def _overfitting_bound(checked: CheckedModel, start: float) -> tuple[float, str]:
    """Return the loss that training must reach, and an explanation."""
    model, train = checked.config
    reachable = reachable_loss(model, checked.inputs_BS, checked.targets_BS)
    bound = reachable + LOSS_MARGIN
    is_only_embedding = model.tied_embeddings and not model.n_layers
    if train.lora or is_only_embedding:
        return max(bound, start - MIN_PROGRESS * (start - reachable)), (
            f"{MIN_PROGRESS:.0%} of the way to {reachable:.2f}, the lowest loss possible"
        )
    if model.n_layers and not (model.residual and (model.norm != "none" or model.n_layers == 1)):
        return max(bound, frequency_loss(checked.targets_BS)), (
            "the entropy of token frequencies; attention without norm or residual learns slowly"
        )
    return bound, f"{reachable:.2f}, the lowest loss possible, + {LOSS_MARGIN}"

"""The eight checks of a model before training. Values that should be equal may
differ by rounding; gradients that should not exist must be exactly 0. Axes as in `model/gpt.py`."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from rungs.checks.causality import (
    Queries,
    check_causality,
    check_rows,
    guaranteed_window,
    influence_on_logits,
)
from rungs.checks.check import Check, failures, print_checks
from rungs.checks.checked_model import ROUNDING, CheckedModel, LogitsOf, relative_difference
from rungs.checks.dead_parameters import Gradient, check_gradients, gradient_of
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.data.tokens.sequences import IGNORED
from rungs.model.blocks import Compute
from rungs.model.generation import Generator
from rungs.model.kernels.cross_entropy import target_losses
from rungs.objectives.table import make_train_step
from rungs.optim.precision import dtype_of
from rungs.parallel.sharding import one_device, place_batch

CACHE_ROUNDING = 1e-4
"""Like ROUNDING, for generation with a cache, whose matmuls have other shapes and orders of
summation: at most 2e-6 in the committed runs, more in deeper models."""
LOSS_MARGIN = 0.1
"""Allowed nats above the lowest possible loss on one batch: a probability of 90% per token."""
MIN_PROGRESS = 0.1
"""Required share of the way to the lowest possible loss, if training cannot reach it."""
MAX_CACHED_TOKENS = 8
GPT2_INIT_STD = 0.02


def run_checks(path: Path, config: RunConfig, checked: CheckedModel) -> bool:
    """Run all checks and print a table, row by row. Return whether none failed."""
    print(*_header(path, config, checked), sep="\n", flush=True)
    return not failures(print_checks(checks_of(checked)))


def _header(path: Path, config: RunConfig, checked: CheckedModel) -> Iterator[str]:
    sequences, tokens = checked.inputs_BS.shape
    weights = checked.start_weights
    origin = "fresh weights" if weights is None else f"the weights of {weights.path}"
    if weights is None and config.model.zero_init_residual:
        origin += " (none of them zero_init_residual)"
    length = config.sequence_length
    yield f"{path}: the first {sequences} sequences, {tokens:,} of their {length:,} tokens, with"
    yield f"{origin}, without dropout, on one CPU device."


def checks_of(checked: CheckedModel) -> Iterator[Check]:
    """Run the checks in order and yield each result. The last check trains the model."""
    logits_of = checked.compiled(lambda model, tokens_BS: model(tokens_BS))
    yield check_initial_loss(checked, np.asarray(logits_of(checked.inputs_BS)))
    queries = Queries.spread_over(*checked.inputs_BS.shape)
    influence_QBS = np.asarray(checked.compiled(influence_on_logits)(checked.inputs_BS, *queries))
    if bidirectional := checked.config.model.bidirectional:
        causality = Check.skipped("causality", "attention is bidirectional")
    else:
        causality = check_causality(checked, logits_of, queries, influence_QBS)
    yield causality
    rows = check_rows(checked, logits_of, queries, influence_QBS)
    yield rows
    gradient = gradient_of(checked, checked.config.train)(checked.inputs_BS, checked.targets_BS)
    yield check_gradients(checked, gradient)
    finite = check_finite(checked, gradient)
    yield finite
    # these two checks would fail for the same reason
    failed = [check.name for check in failures((causality, rows, finite))]
    if failed or bidirectional:
        reason = f"{' and '.join(failed)} must pass first" if failed else causality.notes[0]
        for name in ("padding", "cache"):
            yield Check.skipped(name, reason)
    else:
        yield check_padding(checked)
        yield check_cache(checked, logits_of)
    yield check_overfitting(checked)


def check_initial_loss(checked: CheckedModel, logits_BSV: np.ndarray) -> Check:
    """Check that fresh weights give all tokens about the same probability."""
    model, targets_BS = checked.config.model, checked.targets_BS
    counts_BS = targets_BS != IGNORED
    losses_BS = np.asarray(target_losses(jnp.asarray(logits_BSV), jnp.asarray(targets_BS)))
    loss = float(losses_BS[counts_BS].mean())
    uniform = f"ln {model.vocab_size:,} = {math.log(model.vocab_size):.3f}"
    if checked.start_weights is not None:
        expected = f"only known for fresh weights: {uniform}"
        return Check("initial loss", f"{loss:.3f}", expected, None)
    lead = _lead_of_input_token(model, logits_BSV, checked.inputs_BS)
    repeated = float((targets_BS == checked.inputs_BS)[counts_BS].mean())
    std = _logit_std(model)
    slack = 0.1 + 4 * std / math.sqrt(counts_BS.sum())
    least = math.log(model.vocab_size) - repeated * lead - slack
    most = math.log(model.vocab_size - 1 + math.exp(lead)) + std**2 / 2 + slack
    expected = f"{least:.2f} to {most:.2f} ({uniform})"
    return Check("initial loss", f"{loss:.3f}", expected, least <= loss <= most)


def _logit_std(model: ModelConfig) -> float:
    """Return an upper bound for the standard deviation of fresh logits, each a normalized vector
    times a random row. Such logits raise the loss by half their variance."""
    if model.init == "truncated_normal":
        return math.sqrt(2 * model.emb_dim / (model.emb_dim + model.vocab_size))
    return GPT2_INIT_STD * math.sqrt(model.emb_dim)


def _lead_of_input_token(
    model: ModelConfig, logits_BSV: np.ndarray, inputs_BS: np.ndarray
) -> float:
    """Return how far the input token's logit exceeds the others: with tied embeddings, by at most
    the norm of a normalized vector times the norm of a row."""
    if not model.tied_embeddings:
        return 0.0
    own_BS = np.take_along_axis(logits_BSV, inputs_BS[..., None], axis=-1)[..., 0]
    lead = float((own_BS - logits_BSV.mean(axis=-1)).mean())
    return min(max(lead, 0.0), _logit_std(model) * math.sqrt(model.emb_dim))


def check_finite(checked: CheckedModel, gradient: Gradient) -> Check:
    """Check that nothing overflows in the run's compute dtype."""
    dtype = dtype_of(checked.config.train)
    logits_of = checked.compiled(lambda model, tokens: model(tokens, compute=Compute(dtype)))
    is_finite = bool(np.isfinite(logits_of(checked.inputs_BS)).all())
    return Check(
        "finite",
        f"logits {_yes_or_no(is_finite)}, loss and gradient {_yes_or_no(gradient.is_finite)}",
        f"yes, in {dtype.name}",
        is_finite and gradient.is_finite,
    )


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def check_padding(checked: CheckedModel) -> Check:
    """Check that tokens after the last counted target do not affect the gradient."""
    # the load-balancing loss depends on all tokens, including padding
    train = checked.config.train.model_copy(update={"load_balancing_weight": 0.0})
    last_B1 = _middle_targets(checked.targets_BS)[:, None]
    is_after_BS = np.arange(checked.targets_BS.shape[-1]) > last_B1
    if not is_after_BS.any():
        return Check.skipped("padding", "no token follows a target")
    targets_BS = np.where(is_after_BS, IGNORED, checked.targets_BS)
    gradient = gradient_of(checked, train)
    expected = gradient(checked.inputs_BS, targets_BS).arrays
    found = gradient(checked.changed_tokens(is_after_BS), targets_BS).arrays
    difference = _norm({name: found[name] - array for name, array in expected.items()})
    moved = difference / (_norm(expected) or 1)
    return Check(
        "padding",
        f"changing tokens after the last target moves the gradient by {moved:.1g}",
        f"at most {ROUNDING:.0e}",
        moved <= ROUNDING,
    )


def _middle_targets(targets_BS: np.ndarray) -> np.ndarray:
    """Return for each row the position of the middle counted target."""
    counted = (np.flatnonzero(targets_S != IGNORED) for targets_S in targets_BS)
    return np.array([positions[len(positions) // 2] for positions in counted])


def _norm(arrays: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in arrays.values()))


def check_cache(checked: CheckedModel, logits_of: LogitsOf) -> Check:
    """Check that left-padded generation, token by token, gives one forward pass's logits."""
    inputs_BS = checked.inputs_BS
    rows, length = inputs_BS.shape
    lengths = [length - row * length // (2 * rows) for row in range(rows)]
    count = min(MAX_CACHED_TOKENS, min(lengths) - 1)
    if not count:
        return Check.skipped("cache", "there is only one token")
    texts = [row[:end].tolist() for row, end in zip(inputs_BS, lengths, strict=True)]
    found = Generator(checked.model).logits_after(texts, count)
    logits_BSV = np.asarray(logits_of(inputs_BS))
    expected = np.stack(
        [row[end - count - 1 : end] for row, end in zip(logits_BSV, lengths, strict=True)]
    )
    difference = relative_difference(found, expected)
    return Check(
        "cache",
        f"{count} tokens one at a time: logits differ by {difference:.1g} from one forward pass",
        f"at most {CACHE_ROUNDING:.0e}",
        difference <= CACHE_ROUNDING,
    )


def check_overfitting(checked: CheckedModel) -> Check:
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
    return Check(
        "overfitting",
        f"{losses[0]:.2f} to {losses[-1]:.2f} in {steps} steps",
        f"at most {bound:.2f}: {why}",
        losses[-1] <= bound,
    )


def _train_on_batch(checked: CheckedModel) -> Iterator[float]:
    """Yield the loss before each step and after the last."""
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


def reachable_loss(model: ModelConfig, inputs_BS: np.ndarray, targets_BS: np.ndarray) -> float:
    """Return the mean conditional entropy of targets given what a model certainly sees before them,
    in nats: without layers a token, else all tokens of the window. A soft cap on logits adds the
    probability that it leaves to other tokens."""
    window = guaranteed_window(model) if model.n_layers else 1
    followers: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for inputs_S, targets_S in zip(inputs_BS.tolist(), targets_BS.tolist(), strict=True):
        for end, target in enumerate(targets_S, start=1):
            if target != IGNORED:
                followers[tuple(inputs_S[max(end - window, 0) : end])][target] += 1
    total = sum(counts.total() for counts in followers.values())
    return sum(map(_total_entropy, followers.values())) / total + _soft_cap_loss(model)


def frequency_loss(targets_BS: np.ndarray) -> float:
    """Return the entropy of the targets, in nats: the loss of knowing only their frequencies."""
    counts = Counter(targets_BS[targets_BS != IGNORED].tolist())
    return _total_entropy(counts) / counts.total()


def _total_entropy(counts: Counter[int]) -> float:
    """Return the entropy of the targets times their number."""
    total = counts.total()
    return sum(n * math.log(total / n) for n in counts.values())


def _soft_cap_loss(model: ModelConfig) -> float:
    """Return the lowest cross-entropy of logits within ± the cap."""
    if model.final_soft_cap is None:
        return 0.0
    return math.log1p((model.vocab_size - 1) * math.exp(-2 * model.final_soft_cap))

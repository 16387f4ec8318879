"""What must hold of any model before it is trained: eight checks of a run as it starts.

Each gives a `CheckResult`. Those that compare what should be alike allow for rounding; what no path
leads to must be zero exactly. Axes as in `model.py`.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.config.train_config import TrainConfig
from rungs.data.sequences import IGNORED
from rungs.diagnostics.model_check import input_gradients
from rungs.diagnostics.model_check.dead_parameters import ExaminedBatch, reach
from rungs.diagnostics.model_check.input_gradients import Queries
from rungs.diagnostics.model_check.reachable_loss import frequency_loss, reachable_loss, sure_window
from rungs.diagnostics.model_check.subject import Patient
from rungs.model.feed_forward import Routing
from rungs.model.generation import Generator
from rungs.model.gpt import GPT, Compute
from rungs.model.kernels.cross_entropy import target_losses
from rungs.optim.precision import dtype_of
from rungs.parallel.mesh import one_device
from rungs.parallel.names import dotted
from rungs.parallel.sharding import Layout, place_batch
from rungs.step.nonfinite import ALL_FINITE
from rungs.step.state import named_arrays
from rungs.step.train_step import MicrobatchAux, gradients, make_train_step

ROUNDING = 1e-5
"""How far what is alike may be apart, relative to the largest logit or the norm of the gradient.
The same program gives the same rows the same bits; a mixture of experts sorts other rows between
them. A float32 is rounded by up to 6e-8 of itself."""
CACHE_ROUNDING = 1e-4
"""The same of a generation, whose products have other shapes and so are summed in another order:
at most 2e-6 in the runs of the ladder, and more in deeper models."""
NEAR_ZERO = 0.1
"""Nats above the loss that can be reached on one batch. A token is then 90% sure."""
LITTLE = 0.1
"""Share of the way there that is asked of a training that cannot go all of it."""
MOST_ONE_BY_ONE = 8
GPT2_SIGMA = 0.02


class CheckResult(NamedTuple):
    """What came of a check."""

    check: str
    measured: str
    expected: str
    passed: bool | None
    """None where there is nothing to check."""
    notes: tuple[str, ...] = ()


class Gradient(NamedTuple):
    """Of the batch, in the run's own `compute_dtype`."""

    arrays: dict[str, np.ndarray]
    """By name of the parameter."""
    losses_A: np.ndarray
    is_finite: bool
    routing: Routing | None


def findings(patient: Patient) -> Iterator[CheckResult]:
    """Each check, as it is done; the last one trains the model."""
    logits_of = patient.compiled(lambda model, tokens_BS: model(tokens_BS))
    yield initial_loss(patient, np.asarray(logits_of(patient.inputs_BS)))
    queries = Queries.over(*patient.inputs_BS.shape)
    influence_QBS = np.asarray(
        patient.compiled(input_gradients.on_logits)(patient.inputs_BS, *queries)
    )
    before = causality(patient, logits_of, queries, influence_QBS)
    yield before
    apart = rows(patient, logits_of, queries, influence_QBS)
    yield apart
    gradient = gradient_of(patient, patient.config.train)(patient.inputs_BS, patient.targets_BS)
    yield reached(patient, gradient)
    whole = finite(patient, gradient)
    yield whole
    for check in (padding, cache):
        yield _resting_on((before, apart, whole), check, patient, logits_of)
    yield overfitted(patient)


LogitsOf = Callable[[np.ndarray], Array]


def _resting_on(
    findings: tuple[CheckResult, ...],
    check: Callable[[Patient, LogitsOf], CheckResult],
    patient: Patient,
    logits_of: LogitsOf,
) -> CheckResult:
    """A check that tells nothing new where one of these failed: it fails for the same reason."""
    failed = [finding.check for finding in findings if finding.passed is False]
    if not failed:
        return check(patient, logits_of)
    return CheckResult(check.__name__, "–", f"rests on {' and '.join(failed)}", None)


def initial_loss(patient: Patient, logits_BSV: np.ndarray) -> CheckResult:
    """Whether fresh weights hold every token for about as likely as any other."""
    model, targets_BS = patient.config.model, patient.targets_BS
    counts_BS = targets_BS != IGNORED
    losses_BS = np.asarray(target_losses(jnp.asarray(logits_BSV), jnp.asarray(targets_BS)))
    loss = float(losses_BS[counts_BS].mean())
    uniform = f"ln {model.vocab_size:,} = {math.log(model.vocab_size):.3f}"
    if patient.before is not None:
        expected = f"asked of fresh weights only: {uniform}"
        return CheckResult("initial loss", f"{loss:.3f}", expected, None)
    lead = _lead_of_own_token(model, logits_BSV, patient.inputs_BS)
    repeated = float((targets_BS == patient.inputs_BS)[counts_BS].mean())
    spread = _logit_spread(model)
    slack = 0.1 + 4 * spread / math.sqrt(counts_BS.sum())
    least = math.log(model.vocab_size) - repeated * lead - slack
    most = math.log(model.vocab_size - 1 + math.exp(lead)) + spread**2 / 2 + slack
    expected = f"{least:.2f} to {most:.2f} ({uniform})"
    return CheckResult("initial loss", f"{loss:.3f}", expected, least <= loss <= most)


def _logit_spread(model: ModelConfig) -> float:
    """Standard deviation of fresh logits, at most: that of a normed vector times a random row. Such
    logits raise the loss by half their variance."""
    if model.init == "truncated_normal":
        return math.sqrt(2 * model.emb_dim / (model.emb_dim + model.vocab_size))
    return GPT2_SIGMA * math.sqrt(model.emb_dim)


def _lead_of_own_token(model: ModelConfig, logits_BSV: np.ndarray, inputs_BS: np.ndarray) -> float:
    """How far the logit of the token that is read stands above the others: with tied embeddings it
    does, by no more than the length of a normed vector times that of a row."""
    if not model.tied_embeddings:
        return 0.0
    own_BS = np.take_along_axis(logits_BSV, inputs_BS[..., None], axis=-1)[..., 0]
    lead = float((own_BS - logits_BSV.mean(axis=-1)).mean())
    return min(max(lead, 0.0), _logit_spread(model) * math.sqrt(model.emb_dim))


def causality(
    patient: Patient, logits_of: LogitsOf, queries: Queries, influence_QBS: np.ndarray
) -> CheckResult:
    """Whether a position depends on itself and, through attention, on all before it that a window
    leaves, and on nothing else."""
    model = patient.config.model
    own_QS = influence_QBS[np.arange(len(queries.row_Q)), queries.row_Q]
    distance_QS = queries.position_Q[:, None] - np.arange(own_QS.shape[-1])
    window = sure_window(model) if model.n_layers else 1
    seen = own_QS[(distance_QS >= 0) & (distance_QS < window)]
    later = float(own_QS[distance_QS < 0].max(initial=0))
    too_old, notes = _beyond_windows(patient, queries)
    moved = _moved_by_later_tokens(patient, logits_of)
    old = f", too old {too_old:.1g}" if notes else ""
    if patient.config.train.target_offset == 0:
        notes += ("the targets are the inputs: what counts is that each position sees itself",)
    what = "own" if window == 1 else "own and earlier"
    return CheckResult(
        "causality",
        f"later {later:.1g}, {what} {seen.min():.1g} to {seen.max():.1g}{old};"
        f" later tokens move logits by {moved:.1g}",
        f"0, {what} above 0; at most {ROUNDING:.0e}",
        later == 0 and too_old == 0 and bool(seen.min() > 0) and moved <= ROUNDING,
        notes,
    )


def _beyond_windows(patient: Patient, queries: Queries) -> tuple[float, tuple[str, ...]]:
    """The largest influence of what is further back than the windows up to a layer reach, and a
    line that says how far that is in which layers."""
    model, length = patient.config.model, patient.inputs_BS.shape[-1]
    reaches: list[int] = []
    for layer, kind in enumerate(model.layer_kinds()):
        steps = (layer + 1) * ((model.sliding_window or length) - 1)
        if kind == "global" or steps >= length - 1:
            break
        reaches.append(steps)
    if not reaches:
        return 0.0, ()
    influence_LQBS = np.asarray(
        patient.compiled(input_gradients.on_layers)(patient.inputs_BS, *queries)
    )
    distance_QS = queries.position_Q[:, None] - np.arange(length)
    furthest = max(
        float(influence_LQBS[layer].sum(axis=1)[distance_QS > steps].max())
        for layer, steps in enumerate(reaches)
    )
    layers = ", ".join(f"layer {layer}: {steps}" for layer, steps in enumerate(reaches))
    return furthest, (f"positions back that windows reach, up to {layers}",)


def _moved_by_later_tokens(patient: Patient, logits_of: LogitsOf) -> float:
    """How far logits move where tokens after them change."""
    inputs_BS = patient.inputs_BS
    half = inputs_BS.shape[-1] // 2
    changed_BS = _others(patient, np.arange(inputs_BS.shape[-1]) >= half)
    return _apart(logits_of(changed_BS)[:, :half], logits_of(inputs_BS)[:, :half])


def rows(
    patient: Patient, logits_of: LogitsOf, queries: Queries, influence_QBS: np.ndarray
) -> CheckResult:
    """Whether the sequences of a batch leave each other alone."""
    count = len(patient.inputs_BS)
    if count == 1:
        return CheckResult("rows", "–", "there is but one sequence", None)
    is_other_QB = queries.row_Q[:, None] != np.arange(count)
    others = float(influence_QBS[is_other_QB].max())
    is_odd_B = np.arange(count) % 2 == 1
    before = logits_of(patient.inputs_BS)
    moved = max(
        _apart(logits_of(_others(patient, changed_B[:, None]))[~changed_B], before[~changed_B])
        for changed_B in (is_odd_B, ~is_odd_B)
    )
    return CheckResult(
        "rows",
        f"others {others:.1g}; their tokens move logits by {moved:.1g}",
        f"0; at most {ROUNDING:.0e}",
        others == 0 and moved <= ROUNDING,
    )


def _others(patient: Patient, where: np.ndarray) -> np.ndarray:
    """The inputs, with other tokens in these places."""
    other_BS = (patient.inputs_BS + 1) % patient.config.model.vocab_size
    return np.where(where, other_BS, patient.inputs_BS)


def _apart(found: Array | np.ndarray, expected: Array | np.ndarray) -> float:
    """The largest difference, relative to the largest of all."""
    if not expected.size:
        return 0.0
    largest = float(np.abs(np.asarray(expected)).max())
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max()) / (largest or 1)


def gradient_of(
    patient: Patient, train: TrainConfig
) -> Callable[[np.ndarray, np.ndarray], Gradient]:
    """The gradient that a step would take, of inputs_BS and targets_BS."""
    layout, wrt = Layout.of(None), patient.optimizer.wrt

    def of(
        model: GPT, inputs_ABS: Array, targets_ABS: Array
    ) -> tuple[nnx.State, MicrobatchAux, Array]:
        return gradients(train, layout, model, wrt, inputs_ABS, targets_ABS, jax.random.key(0))

    compiled = patient.compiled(of)

    def gradient(inputs_BS: np.ndarray, targets_BS: np.ndarray) -> Gradient:
        state, aux, first_nonfinite_A = compiled(*patient.in_microbatches(inputs_BS, targets_BS))
        flat = nnx.to_flat_state(state)
        arrays = {dotted(path): np.asarray(variable.get_value()) for path, variable in flat}
        losses_A = np.asarray(aux.losses_A / aux.weights_A)
        return Gradient(
            arrays, losses_A, bool((first_nonfinite_A == ALL_FINITE).all()), aux.routing
        )

    return gradient


def reached(patient: Patient, gradient: Gradient) -> CheckResult:
    """Whether every trained parameter has a gradient."""
    if not gradient.is_finite:
        return CheckResult("gradients", "–", "rests on finite", None)
    routing = gradient.routing
    expert_tokens_LE = None if routing is None else np.asarray(routing.counts_E).sum(axis=0)
    found = reach(
        patient.config.model,
        gradient.arrays,
        {name: np.asarray(array) for name, array in named_arrays(patient.model).items()},
        ExaminedBatch(patient.inputs_BS, patient.targets_BS, expert_tokens_LE),
    )
    norm, name = found.least
    return CheckResult(
        "gradients",
        f"{found.parts:,} parts, {len(found.dead):,} without; least {norm:.0e}, {name}",
        "none without",
        not found.dead,
        (*(f"no gradient: {part}" for part in found.dead), *found.excused),
    )


def finite(patient: Patient, gradient: Gradient) -> CheckResult:
    """Whether nothing overflows in the type that is computed in."""
    dtype = dtype_of(patient.config.train)
    logits_of = patient.compiled(lambda model, tokens: model(tokens, compute=Compute(dtype)))
    is_finite = bool(np.isfinite(logits_of(patient.inputs_BS)).all())
    return CheckResult(
        "finite",
        f"logits {_yes(is_finite)}, loss and gradient {_yes(gradient.is_finite)}",
        f"yes, in {dtype.name}",
        is_finite and gradient.is_finite,
    )


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def padding(patient: Patient, _: LogitsOf) -> CheckResult:
    """Whether what stands after the last target that counts leaves the gradient alone."""
    # the load-balancing loss is one of all tokens, those that fill up among them
    train = patient.config.train.model_copy(update={"load_balancing_weight": 0.0})
    last_B1 = _middle_targets(patient.targets_BS)[:, None]
    is_after_BS = np.arange(patient.targets_BS.shape[-1]) > last_B1
    if not is_after_BS.any():
        return CheckResult("padding", "–", "no token stands after a target", None)
    targets_BS = np.where(is_after_BS, IGNORED, patient.targets_BS)
    gradient = gradient_of(patient, train)
    expected = gradient(patient.inputs_BS, targets_BS).arrays
    found = gradient(_others(patient, is_after_BS), targets_BS).arrays
    apart = _norm({name: found[name] - array for name, array in expected.items()})
    distance = apart / (_norm(expected) or 1)
    return CheckResult(
        "padding",
        f"tokens after the last target move the gradient by {distance:.1g}",
        f"at most {ROUNDING:.0e}",
        distance <= ROUNDING,
    )


def _middle_targets(targets_BS: np.ndarray) -> np.ndarray:
    """For each row the position of the middle one of the targets that count."""
    counting = (np.flatnonzero(targets_S != IGNORED) for targets_S in targets_BS)
    return np.array([positions[len(positions) // 2] for positions in counting])


def _norm(arrays: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in arrays.values()))


def cache(patient: Patient, logits_of: LogitsOf) -> CheckResult:
    """Whether a generation, filled up at its start and token by token, has the logits of whole
    passes."""
    inputs_BS = patient.inputs_BS
    rows, length = inputs_BS.shape
    lengths = [length - row * length // (2 * rows) for row in range(rows)]
    news = min(MOST_ONE_BY_ONE, min(lengths) - 1)
    if not news:
        return CheckResult("cache", "–", "no token stands before another", None)
    texts = [row[:end].tolist() for row, end in zip(inputs_BS, lengths, strict=True)]
    found = Generator(patient.model).logits_after(texts, news)
    whole = np.asarray(logits_of(inputs_BS))
    expected = np.stack(
        [row[end - news - 1 : end] for row, end in zip(whole, lengths, strict=True)]
    )
    apart = _apart(found, expected)
    return CheckResult(
        "cache",
        f"{news} tokens one by one: logits {apart:.1g} from those of a whole pass",
        f"at most {CACHE_ROUNDING:.0e}",
        apart <= CACHE_ROUNDING,
    )


def overfitted(patient: Patient) -> CheckResult:
    """Whether a training on one batch brings its loss to where the model can."""
    losses: list[float] = []
    bound, why = math.inf, ""
    for loss in _trained(patient):
        if not losses:
            bound, why = _bound(patient, loss)
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


def _trained(patient: Patient) -> Iterator[float]:
    """The loss before each step, and after the last."""
    mesh = one_device()
    step = make_train_step(patient.overfitting, mesh)
    batch = place_batch(mesh, *patient.in_microbatches(patient.inputs_BS, patient.targets_BS))
    for _ in range(patient.steps + 1):
        result = step(patient.model, patient.optimizer, *batch)
        yield float(np.average(result.losses_A, weights=result.weights_A))


def _bound(patient: Patient, start: float) -> tuple[float, str]:
    """The loss that training has to reach, and what it is."""
    model, train = patient.config
    reachable = reachable_loss(model, patient.inputs_BS, patient.targets_BS)
    low = reachable + NEAR_ZERO
    is_bound_to_inputs = model.tied_embeddings and not model.n_layers
    if train.lora or is_bound_to_inputs:
        return max(low, start - LITTLE * (start - reachable)), (
            f"{LITTLE:.0%} of the way to the {reachable:.2f} that inputs leave open"
        )
    if model.n_layers and not (model.residual and (model.norm != "none" or model.n_layers == 1)):
        return max(low, frequency_loss(patient.targets_BS)), (
            "what targets' frequencies give; attention without norm or residual learns slowly"
        )
    return low, f"{reachable:.2f} that inputs leave open + {NEAR_ZERO}"

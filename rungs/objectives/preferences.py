"""Learning from preferences: losses of pairs of a chosen and a rejected answer, and the reference,
the weights that the run starts from, whose log-probabilities are computed once and stored in the
dataset's folder.

Axes as in `rungs/model/gpt.py`; P pairs. The rows of B alternate: chosen, rejected, chosen, …"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from rungs.checkpointing.load import Start, find_starting_weights, load_frozen
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import RunFailure, UserError
from rungs.common.paths import file_checksum
from rungs.common.shown_text import counted
from rungs.config.train_config import TrainConfig
from rungs.data.tokens.dataset import TRAIN, VALIDATION, Dataset, Split
from rungs.data.tokens.loader import PreferenceBatch, ValidationData
from rungs.data.tokens.stored_arrays import DamagedError, Store
from rungs.model.blocks import Compute
from rungs.model.feed_forward import Routing
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.objectives.next_token import NextToken, RunData
from rungs.parallel import collectives, processes
from rungs.parallel.sharding import CONTEXT, TOKEN_AXES
from rungs.run.metrics import PreferenceFigures
from rungs.step.eval_step import Sums, make_evaluation_step, sequence_losses
from rungs.step.objective import Aux, Microbatch, load_balancing

log = logging.getLogger("rungs")

RECORD = "(reference)"
"""Key of the checksum of the reference among those of datasets in a checkpoint's manifest."""
_LOG_PROBS = "log_probs"
_ALL_TOKENS = 2**62


class LogProbs(NamedTuple):
    """The log-probabilities of pairs, each (P,), in nats: sums over an answer's tokens."""

    chosen: Any
    rejected: Any
    reference_chosen: Any
    """0 without a reference."""
    reference_rejected: Any

    @classmethod
    def of(cls, sums_B: Any, reference_B: Any) -> "LogProbs":
        """Return those of rows that alternate."""
        return cls(
            sums_B[..., 0::2], sums_B[..., 1::2], reference_B[..., 0::2], reference_B[..., 1::2]
        )

    @property
    def margins(self) -> Any:
        """By how much the difference of the two answers is above that of the reference."""
        return (self.chosen - self.reference_chosen) - (self.rejected - self.reference_rejected)


def dpo(pairs: LogProbs, train: TrainConfig) -> Array:
    """Return −ln σ(β · margin): Rafailov et al. 2023, arXiv 2305.18290, equation 7."""
    return -jax.nn.log_sigmoid(train.preference_beta * pairs.margins)


def ipo(pairs: LogProbs, train: TrainConfig) -> Array:
    """Return (margin − 1 ÷ 2β)², of means per token: Azar et al. 2023, arXiv 2310.12036, equation
    17, with lengths normalized as in TRL."""
    return jnp.square(pairs.margins - 1 / (2 * train.preference_beta))


def simpo(pairs: LogProbs, train: TrainConfig) -> Array:
    """Return −ln σ(β · margin − γ), of means per token without reference: Meng et al. 2024, arXiv
    2405.14734, equation 6."""
    return -jax.nn.log_sigmoid(train.preference_beta * pairs.margins - train.simpo_gamma)


LOSSES: dict[str, Callable[[LogProbs, TrainConfig], Array]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
}


class Preferences(NextToken):
    """The mean loss of pairs. Arrays: inputs_BS; targets_BS; None; reference_BS, the reference's
    log-probability of the row's answer at the first token, 0 at the others. Without the latter it
    is 0. Outputs: log_probs_BS of the targets, reference_BS, which targets count, and what else
    there is."""

    array_names = PreferenceBatch._fields
    validates_cross_entropy = False

    _reference: "Reference | None" = None

    def loss(self, model: GPT, compute: Compute, microbatch: Microbatch) -> tuple[Array, Aux]:
        _, targets_BS, *others = microbatch.arrays
        log_probs_BS, routing = self.log_probs(model, compute, microbatch)
        given = _given(others, targets_BS)
        sums = tuple(array.sum(-1) for array in (log_probs_BS, *given))
        mean = collectives.to_varying(self.losses(*collectives.psum(sums, CONTEXT)).mean(), CONTEXT)
        loss = mean / collectives.axis_size(*TOKEN_AXES)
        outputs = jax.lax.stop_gradient(log_probs_BS), *given
        summed_loss = collectives.psum(loss, *TOKEN_AXES)
        if routing is not None:
            balance, routing = load_balancing(routing, self.train.load_balancing_weight)
            loss += balance
        return loss, Aux(summed_loss, jnp.ones_like(summed_loss), routing, outputs)

    def log_probs(
        self, model: GPT, compute: Compute, microbatch: Microbatch
    ) -> tuple[Array, Routing | None]:
        """Return log_probs_BS of the targets, with gradients, and the routing of all layers."""
        inputs_BS, targets_BS, *_ = microbatch.arrays
        losses_BS, routing = model.map_logits(
            target_losses, inputs_BS, targets_BS, (), self.dropout(microbatch), compute
        )
        return -losses_BS, routing

    def losses(self, sums_B: Any, reference_B: Any, counts_B: Any) -> Array:
        """Return losses_P from the sums of log-probabilities and the numbers of answer tokens."""
        pairs = self.pairs(sums_B, reference_B, counts_B)
        return LOSSES[self.train.objective](pairs, self.train)

    def pairs(self, sums_B: Any, reference_B: Any, counts_B: Any) -> LogProbs:
        """Return what the loss compares: sums, or means per token."""
        if self.train.objective != "dpo":
            counts_B = jnp.maximum(counts_B, 1)
            sums_B, reference_B = sums_B / counts_B, reference_B / counts_B
        return LogProbs.of(sums_B, reference_B)

    def starts(self, *_: Any) -> None:
        return None

    def of_logits(self, logits_BSV: Array, *arrays: Any) -> Array:
        targets_BS, *others = arrays
        log_probs_BS = -target_losses(logits_BSV, targets_BS)
        arrays = log_probs_BS, *_given(others, targets_BS)
        return self.losses(*(array.sum(-1) for array in arrays)).mean()

    def prepare(self, start: Start, mesh: Mesh, data: RunData) -> None:
        if self.train.has_reference:
            self._reference = Reference(start, mesh)
            self._reference.complete(data)

    @property
    def record(self) -> dict[str, dict[str, str]]:
        return {RECORD: {"weights": self._reference.checksum}} if self._reference else {}

    def figures(self, outputs_ABS: Any, finite_A: np.ndarray) -> dict[str, Any]:
        sums = (array[finite_A].sum(axis=-1, dtype=np.float64).ravel() for array in outputs_ABS)
        return {"preferences": self._figures(*sums)}

    def measure(self, data: ValidationData, sums: Sums) -> Sums:
        losses_N, counts_N = sums
        log_probs_N = -losses_N.astype(np.float64)
        reference_N, *more = data.answers()
        losses_P = np.asarray(self.losses(log_probs_N, reference_N, counts_N, *more), np.float64)
        # A pair's loss counts once, at its first sequence.
        weights_N = np.arange(len(losses_N)) % 2 == 0
        return np.where(weights_N, losses_P.repeat(2), 0), weights_N.astype(np.float64)

    def validation_figures(self, data: ValidationData, sums: Sums) -> dict[str, Any]:
        losses_N, counts_N = sums
        reference_N, *more = data.answers()
        figures = self._figures(-losses_N.astype(np.float64), reference_N, counts_N, *more)
        return {"validation_preferences": figures}

    def _figures(self, sums_B: Any, *others: Any) -> PreferenceFigures:
        """Return the figures of sequences, without values if there are none."""
        figures = self.means(sums_B, *others) if len(sums_B) else {}
        return PreferenceFigures(
            **{name: float(v) if math.isfinite(v) else None for name, v in figures.items()}
        )

    def means(self, sums_B: Any, reference_B: Any, counts_B: Any) -> dict[str, Any]:
        """Return the fields of `PreferenceFigures`; arguments as for `losses`, at least one."""
        train, pairs = self.train, LogProbs.of(sums_B, reference_B)
        means = self.pairs(sums_B, reference_B, counts_B)
        margins_P = np.asarray((pairs if train.has_reference else means).margins)
        figures = {
            "margin": train.preference_beta * margins_P.mean(),
            "accuracy": (margins_P > 0).mean(),
            "chosen_log_prob": pairs.chosen.mean(),
            "rejected_log_prob": pairs.rejected.mean(),
        }
        if train.has_reference:
            figures["kl"] = (reference_B - sums_B).mean()
        return figures


def _given(others: list[Any], targets_BS: Array) -> list[Array]:
    """Return reference_BS, 0 if it is not among the other arrays, which targets count, and the
    arrays after the reference."""
    reference_BS, *more = others[1:] or [None]
    if reference_BS is None:
        reference_BS = jnp.zeros_like(targets_BS, jnp.float32)
    return [reference_BS, targets_BS >= 0, *(array for array in more if array is not None)]


@dataclasses.dataclass
class Reference:
    """The reference of a run."""

    start: Start
    mesh: Mesh

    def __post_init__(self) -> None:
        saved = self.start.saved
        self._recorded = saved.meta.datasets.get(RECORD, {}).get("weights") if saved else None
        self.checksum = self._recorded or self._find_weights().sha256()

    def complete(self, data: RunData) -> None:
        """Give the batches of a run the log-probabilities. Raises UserError if they are neither
        stored nor to be computed."""
        datasets = data.train.datasets
        data.train.set_reference(self.log_probs(datasets, TRAIN))
        held_out = self.log_probs(datasets | data.others, VALIDATION)
        for part in (data.validation.own, *data.validation.others.values()):
            if part is not None:
                part.set_reference(held_out)

    def _find_weights(self) -> Weights:
        weights = find_starting_weights(self.start.run, self.start.config)
        assert weights is not None  # start_from is required
        return weights

    def log_probs(self, datasets: Mapping[str, Dataset], split: Split) -> dict[str, np.ndarray]:
        """Return the log-probability of each answer of the datasets that have the split, from its
        file or computed. Raises UserError if the weights were replaced since the run started."""
        here = {name: one for name, one in datasets.items() if split in one.description.splits}
        stores = {name: self._store(one, split) for name, one in here.items()}
        found = {}
        for name, store in stores.items():
            with contextlib.suppress(DamagedError):
                found[name] = store.open().read_all(_LOG_PROBS)
        if not processes.in_any_process(self.mesh, len(found) < len(here)):
            return found
        computed = self._compute(here, split)
        if processes.is_first_process():
            for name, log_probs in computed.items():
                _write(stores[name], log_probs)
        return computed

    def _store(self, dataset: Dataset, split: Split) -> Store:
        train, file = self.start.config.train, dataset.tokenizer_file
        key = {
            "weights": self.checksum,
            "tokenizer": file_checksum(file) or "" if file else train.tokenizer,
            "answers": dataset.description.splits[split].sha256,
            "compute_dtype": train.compute_dtype,
        }
        answers = dataset.description.splits[split].pairs
        assert answers is not None
        name, row = f"reference-{split}", (np.float32, ())
        count = answers.pairs
        if answers.is_unpaired:  # each has another answer, cut to the length
            key, count = key | {"sequence_length": self.start.config.sequence_length}, 2 * count
        return Store.of(dataset.folder, name, key, count, log_probs=row)

    def _compute(self, datasets: Mapping[str, Dataset], split: Split) -> dict[str, np.ndarray]:
        weights, config = self._find_weights(), self.start.config
        if self._recorded and weights.sha256() != self._recorded:
            raise UserError(
                f"{self.start.run.path / config.train_file}: start_from: {weights.path} is not"
                " what this run was started with, and the reference's log-probabilities are no"
                f" longer stored; restore one of the two, or {self.start.fresh_start}"
            )
        model = load_frozen(weights, config, self.mesh)
        step, found = make_evaluation_step(NextToken(config.train), config.train, self.mesh), {}
        for name, dataset in datasets.items():
            changes = {"dataset": name, "validation_tokens": _ALL_TOKENS}
            own = config._replace(train=config.train.model_copy(update=changes))
            data = ValidationData(own, {name: dataset}, split)
            log.info("reference: %s of %s (%s)", counted(data.sequences, "answer"), name, split)
            losses_N, _ = sequence_losses(model, step, data, self.mesh)
            found[name] = (-losses_N).astype(np.float32)
        return found


def _write(store: Store, log_probs: np.ndarray) -> None:
    """Store the numbers, float32, one per answer, if the folder can be written."""
    try:
        store.write(lambda rows: {_LOG_PROBS: log_probs[list(rows)]})
    except (UserError, RunFailure) as error:
        log.warning("%s; so the reference's numbers are computed anew each start", error)

"""Distillation (Hinton et al. 2015, arXiv 1503.02531): the objective, and a teacher's predictions,
computed beside each step or, of its most likely tokens, stored before
(`data/tokens/stored_arrays.py`).

Axes as in `rungs/model/gpt.py`; K the tokens that are most likely to a teacher, M targets."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from rungs.checkpointing.checkpoint_folder import find_valid_weights
from rungs.checkpointing.load import MergedWeights, Start, load_frozen
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError, errors_at
from rungs.common.shown_text import command_line, quoted
from rungs.config.run_config import AnyRunConfig, RunConfig, errors_in_files_of
from rungs.config.train_config import TrainConfig
from rungs.data import catalog
from rungs.data.provenance import check_same_tokenizer
from rungs.data.tokens.dataset import TRAIN, Dataset
from rungs.data.tokens.loader import DistillationBatch, TrainingData
from rungs.data.tokens.stored_arrays import Arrays, Store
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.objectives.next_token import NextToken, PlacedBatch, RunData
from rungs.optim.precision import dtype_of
from rungs.parallel import collectives
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.sharding import TENSOR, Layout, one_device, place_batch
from rungs.run.folder import RunFolder
from rungs.step.forward import on_mesh
from rungs.step.objective import Aux, Microbatch, mean_over_targets

log = logging.getLogger("rungs")

RECORD = "(teacher)"
"""Key of the teacher's checksum among those of datasets in a checkpoint's manifest."""


class Predictions(NamedTuple):
    """What a teacher predicts at each place, at the temperature of the run."""

    log_probs: Array
    """(…, V) of all tokens; or (…, K + 1) of the K most likely and, last, of all others at once."""
    tokens: Array | None = None
    """(…, K), the most likely tokens; None: all in order."""


class Distillation(NextToken):
    """The mean over counted targets of (1 − h) · T² · KL(teacher ‖ student) + h · cross-entropy,
    with both distributions of the KL divergence at temperature T. Arrays: inputs_BS; targets_BS;
    starts_BS or None; and the fields of `Predictions`."""

    array_names = DistillationBatch._fields

    _teacher: "Teacher"
    _placed: "tuple[GPT, TeacherStep] | None" = None
    """The teacher on the run's devices, if its predictions are not stored."""

    def loss(self, model: GPT, compute: Compute, microbatch: Microbatch) -> tuple[Array, Aux]:
        inputs_BS, targets_BS, starts_BS, *predictions = microbatch.arrays
        given = tuple(array for array in predictions if array is not None)
        dropout = self.dropout(microbatch)
        losses_BS, routing = model.map_logits(
            self.losses, inputs_BS, targets_BS, given, dropout, compute, starts_BS
        )
        total = losses_BS.sum()
        return mean_over_targets(total, targets_BS, routing, self.train.load_balancing_weight)

    def losses(self, logits: Array, targets: Array, *predictions: Array) -> Array:
        """Return the loss at each target, 0 where it is negative."""
        temperature, hard = self.train.teacher_temperature, self.train.hard_target_weight
        softened = divergence(logits / temperature, Predictions(*predictions))
        losses = (1 - hard) * temperature**2 * softened + hard * target_losses(logits, targets)
        return jnp.where(targets >= 0, losses, 0)

    def of_logits(self, logits_BSV: Array, *arrays: Any) -> Array:
        targets_BS, _, *predictions = arrays
        given = (array for array in predictions if array is not None)
        return self.losses(logits_BSV, targets_BS, *given).mean()

    def open(self, start: Start, data: TrainingData, datasets_dir: Path) -> None:
        config = start.config
        teacher = self._teacher = Teacher.of(start.run, config, data.datasets)
        recorded = start.saved.meta.datasets.get(RECORD) if start.saved else None
        if recorded and recorded != teacher.record:
            raise UserError(
                f"{start.run.path / config.train_file}: teacher: {teacher.weights.path} is"
                f" not what this run was started with; restore it, or {start.fresh_start}"
            )
        if config.train.teacher_top_k is not None:
            store, sequences_N = teacher.store(config, data, datasets_dir)
            if not store.exists():
                raise UserError(
                    f"{start.run.path / config.train_file}: teacher_top_k: the teacher's"
                    f" predictions are not stored yet: {command_line('train')}"
                    f" {quoted(start.run.path)} --store-teacher"
                )
            stored = store.open()
            data.predictions = lambda indices: stored.read(
                np.searchsorted(sequences_N, indices).tolist()
            )

    def prepare(self, start: Start, mesh: Mesh, data: RunData) -> None:
        if data.train.predictions is None:
            self._placed = self._teacher.place(start.config, mesh)

    def prepare_on_host(self, config: RunConfig, data: TrainingData) -> None:
        if data.predictions is None:
            alone = config._replace(train=config.train.model_copy(update={"sharding": None}))
            data.predictions = ComputedPredictions(self._teacher, alone, data, one_device()).read

    @property
    def record(self) -> dict[str, dict[str, str]]:
        return {RECORD: self._teacher.record}

    @property
    def adds_arrays(self) -> bool:
        return self._placed is not None

    def arrays(self, batch: PlacedBatch) -> PlacedBatch:
        if self._placed is None:
            return batch
        model, predict = self._placed
        inputs_ABS, targets_ABS, starts_ABS = batch
        assert inputs_ABS is not None
        return inputs_ABS, targets_ABS, starts_ABS, *predict(model, inputs_ABS, starts_ABS)


def divergence(logits: Array, teacher: Predictions) -> Array:
    """Return KL(teacher ‖ student) in nats, from the student's logits (…, V), this device's part if
    the vocabulary is split. With the teacher's most likely tokens only, all others count as one."""
    total = _log_sum(logits)
    if teacher.tokens is None:
        log_p = _own_part(teacher.log_probs, logits.shape[-1])
        log_q = logits - total[..., None]
        return collectives.psum(_relative_entropy(log_p, log_q), TENSOR)
    rows = logits.shape[-1]
    own = teacher.tokens - collectives.vocabulary_offset(rows)
    own = jnp.where((own >= 0) & (own < rows), own, rows)  # others are past this device's end
    log_q = _at(logits, own) - total[..., None]
    others = _log_sum(_without(logits, own)) - total
    return _relative_entropy(
        teacher.log_probs, jnp.concatenate([log_q, others[..., None]], axis=-1)
    )


def _relative_entropy(log_p: Array, log_q: Array) -> Array:
    """Return Σ p (log p − log q) over the last axis; nothing where p is 0."""
    counts = log_p > -jnp.inf
    difference = jnp.where(counts, log_p, 0) - jnp.where(counts, log_q, 0)
    return jnp.where(counts, jnp.exp(log_p) * difference, 0).sum(axis=-1)


def _log_sum(logits: Array) -> Array:
    """Return log Σ exp(logits) over the vocabulary of all devices."""
    largest = collectives.pmax(jax.lax.stop_gradient(logits).max(axis=-1), TENSOR)
    exponentials = jnp.exp(logits - largest[..., None])
    return jnp.log(collectives.psum(exponentials.sum(axis=-1), TENSOR)) + largest


def _own_part(log_probs: Array, rows: int) -> Array:
    """Return this device's part of all tokens' log-probabilities, −∞ for padding."""
    missing = rows * collectives.axis_size(TENSOR) - log_probs.shape[-1]
    widths = [(0, 0)] * (log_probs.ndim - 1) + [(0, missing)]
    padded = jnp.pad(log_probs, widths, constant_values=-jnp.inf)
    first = collectives.vocabulary_offset(rows)
    return jax.lax.dynamic_slice_in_dim(padded, first, rows, axis=-1)


def _at(logits: Array, own: Array) -> Array:
    """Return the logits of some tokens, on all devices."""
    found = jnp.take_along_axis(logits, own, axis=-1, mode="fill", fill_value=0)
    return collectives.psum(found, TENSOR)


def _without(logits: Array, own: Array) -> Array:
    """Return the logits with −∞ for some tokens."""
    flat = logits.reshape(-1, logits.shape[-1])
    rows = jnp.arange(len(flat))[:, None], own.reshape(len(flat), -1)
    is_left = jnp.ones_like(flat, bool).at[rows].set(False, mode="drop")
    return jnp.where(is_left.reshape(logits.shape), logits, -jnp.inf)


TeacherStep = Callable[[GPT, Array, Array | None], Predictions]


def make_teacher_step(train: TrainConfig, layout: Layout) -> TeacherStep:
    """Return a compiled function of (teacher, inputs_ABS, starts_ABS) that returns the teacher's
    predictions, (A, B, S, …). `layout` is the teacher's."""
    dtype, batch = dtype_of(train), layout.batch_spec(3)
    temperature, most = train.teacher_temperature, train.teacher_top_k

    def of_rows(
        teacher: GPT, gatherer: WeightGatherer, inputs_ABS: Array, starts_ABS: Array | None
    ) -> Predictions:
        compute = Compute(dtype, gather=gatherer.gather_layer)

        def of_microbatch(arrays: tuple[Array, Array | None]) -> Predictions:
            inputs_BS, starts_BS = arrays
            logits_BSV = teacher.forward(inputs_BS, compute=compute, starts_BS=starts_BS).logits_BSV
            logits_BSV = collectives.replicate(logits_BSV, TENSOR, joined=2)
            return predictions(logits_BSV[..., : teacher.config.vocab_size] / temperature, most)

        return jax.lax.map(of_microbatch, (inputs_ABS, starts_ABS))

    outputs: Any = Predictions(batch, batch if most else None)  # type: ignore[arg-type]

    def teacher_step(teacher: GPT, inputs_ABS: Array, starts_ABS: Array | None) -> Predictions:
        found = on_mesh(layout, teacher, dtype, of_rows, (batch, batch), outputs)
        predicted: Predictions = found(inputs_ABS, starts_ABS)
        return predicted

    return nnx.jit(teacher_step)


def predictions(logits_BSV: Array, most: int | None) -> Predictions:
    """Return the distribution of logits, or its `most` likely tokens and the rest."""
    log_probs_BSV = jax.nn.log_softmax(logits_BSV)
    if most is None:
        return Predictions(log_probs_BSV)
    log_probs_BSK, tokens_BSK = jax.lax.top_k(log_probs_BSV, most)
    others_BS = jax.nn.logsumexp(_without(log_probs_BSV, tokens_BSK), axis=-1)
    joined = jnp.concatenate([log_probs_BSK, others_BS[..., None]], axis=-1)
    return Predictions(joined, tokens_BSK)


def find_teacher(place: str, config: AnyRunConfig) -> Weights:
    """Return the weights of a teacher. Raises UserError if there are none, they are damaged, or
    have another vocabulary or too short a context for a run."""
    weights = MergedWeights(find_valid_weights(place))
    theirs = weights.header.model
    theirs.require_next_token()
    if theirs.vocab_size != config.model.vocab_size:
        raise UserError(
            f"{weights.path} has a vocabulary of {theirs.vocab_size:,} tokens, this run one of"
            f" {config.model.vocab_size:,}; both need the same tokenizer"
        )
    if theirs.context_length < config.sequence_length:
        raise UserError(
            f"{weights.path} has a context of {theirs.context_length:,} tokens, sequences have"
            f" {config.sequence_length:,}; set a smaller sequence_length"
        )
    return weights


def place_teacher(weights: Weights, config: AnyRunConfig, mesh: Mesh) -> GPT:
    """Return a teacher on the devices of a run. Raises UserError if they can't split it."""
    model = weights.header.model
    if lines := Layout.of(config.train.sharding, mesh).problems(model):
        raise UserError.at(weights.path, lines)
    return load_frozen(weights, config._replace(model=model), mesh)


class Teacher(NamedTuple):
    """The weights of a run's teacher, which fit the run."""

    weights: Weights
    sha256: str

    @classmethod
    def of(cls, run: RunFolder, config: RunConfig, datasets: dict[str, Dataset]) -> Self:
        """Find the teacher of a run. Raises UserError if there is none, it is damaged, or its
        tokens are not those of the run."""
        assert config.train.teacher is not None
        with errors_at(f"{run.path / config.train_file}: teacher: "):
            weights = find_teacher(config.train.teacher, config)
            check_same_tokenizer(datasets, config.train.tokenizer, weights.tokenizer)
        if (config.train.teacher_top_k or 0) >= config.model.vocab_size:
            raise UserError(
                f"{run.path / config.train_file}: teacher_top_k: {config.train.teacher_top_k} is"
                f" not below the vocabulary of {config.model.vocab_size:,}; remove it to learn from"
                " all tokens"
            )
        return cls(weights, weights.sha256())

    @property
    def record(self) -> dict[str, str]:
        """What a checkpoint records of it."""
        return {"weights": self.sha256}

    def place(self, config: RunConfig, mesh: Mesh) -> tuple[GPT, TeacherStep]:
        """Return the teacher on the devices of a run, and its compiled step. Raises UserError if
        the devices can't split it."""
        train = config.train
        plain = config._replace(train=train.model_copy(update={"matmul_dtype": None}))
        teacher = place_teacher(self.weights, plain, mesh)
        return teacher, make_teacher_step(train, Layout.of(train.sharding, mesh))

    def store(
        self, config: RunConfig, data: TrainingData, datasets_dir: Path
    ) -> tuple[Store, np.ndarray]:
        """Return the place of the predictions of the teacher's K most likely tokens, and the N
        sequences that they are of, in the order before shuffling: those of a whole epoch if they
        are stored, else those that the run reads. It has `log_probs`, float32 (N, S, K + 1), with
        that of all others together last; `tokens`, uint16 or int32 (N, S, K)."""
        whole_N, read_N = np.arange(data.distinct_sequences), data.sequences_read()
        whole = self._store_of(whole_N, config, data, datasets_dir)
        if len(read_N) == len(whole_N) or whole.exists():
            return whole, whole_N
        return self._store_of(read_N, config, data, datasets_dir), read_N

    def _store_of(
        self, sequences_N: np.ndarray, config: RunConfig, data: TrainingData, datasets_dir: Path
    ) -> Store:
        train = config.train
        key = {
            "teacher": self.sha256,
            "compute_dtype": train.compute_dtype,
            "top_k": train.teacher_top_k,
            "temperature": train.teacher_temperature,
            "datasets": {
                name: dataset.description.splits[TRAIN].sha256
                for name, dataset in data.datasets.items()
            },
            "mixture": train.as_json()["dataset"],
            "documents": train.documents,
            "sequence_length": config.sequence_length,
            "start_train_token": train.start_train_token,
            "target_offset": train.target_offset,
            "sequences": len(sequences_N),
        }
        if data.phases is not None:
            key["phases"] = data.phases.settings
        if train.packing != "in_order":
            key["packing"] = train.packing
        if train.epochs_differ:
            key |= {"windows": train.windows, "seed": train.seed}
        if sequences_N[-1] >= len(sequences_N):  # the first ones of a shuffled epoch
            key |= {"epoch": data.distinct_sequences, "seed": train.seed}
        length, most = config.sequence_length, train.teacher_top_k
        assert most is not None
        return Store.of(
            datasets_dir,
            "predictions",
            key,
            len(sequences_N),
            log_probs=(np.float32, (length, most + 1)),
            tokens=(_id_type(config), (length, most)),
        )


def _id_type(config: RunConfig) -> type[np.generic]:
    """Return the dtype of the predictions' tokens."""
    return np.uint16 if config.model.vocab_size <= 2**16 else np.int32


def store_predictions(
    run: RunFolder, config: RunConfig, datasets_dir: Path, make_mesh: Callable[[], Mesh]
) -> None:
    """Write what the teacher of a run predicts for its training data, computed on the devices of
    `make_mesh`, which is called once the inputs are checked. Raises UserError if the run has no
    teacher_top_k, or its inputs don't fit together."""
    if config.train.teacher_top_k is None:
        raise UserError(
            f"{run.path / config.train_file}: teacher_top_k: not set; it says how many tokens"
            " --store-teacher stores for each place"
        )
    datasets = catalog.open_datasets(config.train.datasets, datasets_dir, update=True)
    teacher = Teacher.of(run, config, datasets)
    with errors_in_files_of(run.path):
        data = TrainingData(config, datasets)
    store, sequences_N = teacher.store(config, data, datasets_dir)
    if store.exists():
        log.info("%s: the predictions are stored already", store.folder)
        return
    computed = ComputedPredictions(teacher, config, data, make_mesh())
    store.write(lambda places: computed.read(np.take(sequences_N, places).tolist()))
    text = "%s: stored what %s predicts for %d of %d sequences"
    count = len(sequences_N), data.distinct_sequences
    log.info(text, store.folder, teacher.weights.path, *count)


class ComputedPredictions:
    """A teacher's predictions for the sequences of a run, as `Teacher.store` has them; without
    teacher_top_k only `log_probs`, of all tokens."""

    def __init__(self, teacher: Teacher, config: RunConfig, data: TrainingData, mesh: Mesh) -> None:
        self._data, self._mesh, self._size = data, mesh, config.train.microbatch_size
        self._model, self._predict = teacher.place(config, mesh)
        self._ids = _id_type(config)

    def read(self, indices: Sequence[int]) -> Arrays:
        """Return the predictions for some sequences."""
        parts = [
            self._microbatch(np.asarray(indices[first : first + self._size]))
            for first in range(0, len(indices), self._size)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _microbatch(self, indices_B: np.ndarray) -> Arrays:
        """Return the predictions for at most a microbatch, which is filled up with its last row."""
        filled_B = np.pad(indices_B, (0, self._size - len(indices_B)), mode="edge")
        inputs_ABS, _, starts_ABS, *_ = place_batch(
            self._mesh, *self._data.read_tokens(filled_B[None])
        )
        log_probs, tokens = jax.device_get(self._predict(self._model, inputs_ABS, starts_ABS))
        arrays = {"log_probs": log_probs[0][: len(indices_B)]}
        if tokens is not None:
            arrays["tokens"] = tokens[0][: len(indices_B)].astype(self._ids)
        return arrays

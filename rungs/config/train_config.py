"""`train.json`: training on a dataset. Its keys of optimizer, schedule, precision, devices and
checkpoints are in `optimization_config.py`. A key's docstring is its description everywhere."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from rungs.common.strict_json import StrictModel, check
from rungs.config.base import AUTO, CountOrAll, MayChange, NotNegative, Positive, Size
from rungs.config.optimization_config import BelowOne, OptimizationConfig

TokenIndex = Annotated[int, Field(ge=0, le=2**62)]
Step = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]
Factor = Annotated[int, Field(ge=2, le=2**16)]
CheckpointSteps = Annotated[tuple[Size, ...], Field(min_length=1, strict=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Objective = Literal[
    "next_token", "multi_token", "masked_diffusion", "dpo", "ipo", "simpo", "kto", "distill"
]
Windows = Literal["consecutive", "random"]
_BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "kto": 0.1}
Mixture = Annotated[dict[str, Positive], Field(min_length=1)]


class Phase(StrictModel):
    """A part of training in which datasets are mixed with the same weights."""

    until: Annotated[float, Field(ge=1e-6, le=1)]
    """Share of the run's tokens after which it ends, rounded down to full steps. The shares rise,
    and the last one is 1."""
    weights: Mixture
    """The datasets that are read, with their weights: `{"name": weight, …}`."""


def _kind_of_dataset(value: Any) -> str:
    if isinstance(value, dict):
        return "(mixture)"
    return "(phases)" if isinstance(value, list | tuple) else "(name)"


NameOrMixture = Annotated[
    Annotated[str, Tag("(name)")]
    | Annotated[Mixture, Tag("(mixture)")]
    | Annotated[tuple[Phase, ...], Field(strict=False, min_length=1), Tag("(phases)")],
    Discriminator(_kind_of_dataset),
]


class TrainConfig(OptimizationConfig):
    """How a model is trained."""

    dataset: NameOrMixture
    """Name of a dataset: `python-stdlib` or the pairs of a task, such as `parity-pairs` (built in),
    a folder under `datasets/`, or a Hugging Face id `owner/name`. Or a mixture of datasets:
    `{"name": weight, …}`. Or phases, mixtures whose weights change:
    `[{"until": 0.8, "weights": {…}}, {"until": 1, "weights": {…}}]`."""
    objective: Objective = "next_token"
    """What a step minimizes. next_token: the cross-entropy of the next token. multi_token: also
    that of the token after it, by the prediction_module of model.json. masked_diffusion: a bound on
    the negative log-likelihood of texts, by filling in masked tokens (LLaDA, Nie et al. 2025);
    needs a bidirectional model and target_offset 0. distill: the divergence from what a teacher
    predicts (Hinton et al. 2015). The others learn from a dataset of preferences, pairs of a chosen
    and a rejected answer: dpo (Rafailov et al. 2023) and ipo (Azar et al. 2023, per token) compare
    with the weights of start_from, the reference; simpo (Meng et al. 2024) needs no reference. kto
    (Ethayarajh et al. 2024) learns from answers that are desirable or not, without pairs, and has a
    reference. A pair, or an answer of kto, is two sequences in a microbatch."""
    beta: Positive | None = None
    """dpo, ipo, simpo and kto: how much the difference between the answers, or from the reference,
    counts. With a reference, a larger one stays closer to it. null: 0.1; for simpo 2."""
    simpo_gamma: NotNegative = 0.5
    """simpo: the margin, in beta × nats per token, by which the chosen answer should win."""
    desirable_weight: NotNegative = 1.0
    """kto: weight of the loss of desirable answers. If there are fewer of them, a larger one."""
    undesirable_weight: NotNegative = 1.0
    """kto: weight of the loss of other answers."""
    multi_token_weight: NotNegative = 0.3
    """multi_token: weight of the module's loss (DeepSeek-V3, section 4.2: 0.3 in the first two
    thirds of training, then 0.1)."""
    tokenizer: MayChange[str] = "gpt2"
    """Hugging Face id of the tokenizer for datasets that do not come with one."""
    gradient_accumulation_steps: Size = 1
    """Microbatches in a step: a step trains on this many × microbatch_size sequences."""
    batch_growth: dict[Step, Factor] = Field(default={})
    """Steps from which on the batch is larger, with the factor on gradient_accumulation_steps: with
    `{"100": 2, "300": 4}` it is twice as large from step 100 on, and four times from step 300 on.
    Steps count from 0; both must rise."""
    min_train_tokens: CountOrAll = -1
    """Tokens to train on in each epoch, rounded up to full steps. -1: as many full steps as the
    data has."""
    start_train_token: TokenIndex = 0
    """Index of the first training token to use."""
    start_val_token: MayChange[TokenIndex] = 0
    """Index of the first validation token to use."""
    validation_tokens: MayChange[Size] = 524_288
    """Maximum number of tokens in each validation, rounded up to full sequences."""
    validation_interval: MayChange[Size | None] = None
    """Steps between validations, counted from step 0. null: one with each checkpoint at
    checkpoint_interval. The last step always has one."""
    validation_minutes: MayChange[Positive | None] = None
    """Also validate when the last validation is this long ago. null: only steps count."""
    stop_after: MayChange[Size | None] = None
    """End the run after this many validations in a row without a validation loss below the lowest
    so far: of those at validation_interval, on the same data. Needs a validation split. null: the
    run ends after its last step."""
    checkpoint_minutes: MayChange[Positive | None] = None
    """Also save a checkpoint when the last one is this long ago. It can't become the best one.
    null: only checkpoint_interval counts."""
    checkpoint_steps: MayChange[Literal["log"] | CheckpointSteps | None] = None
    """More steps after which a checkpoint is saved, to study training: a list, or "log" for 1, 2,
    4, … up to checkpoint_interval. None of them can become the best one. Needs keep_checkpoints -1.
    null: none."""
    validation_datasets: MayChange[Annotated[tuple[str, ...], Field(strict=False)]] = ()
    """More datasets to measure the loss on at each validation. The run's own validation loss, which
    decides which checkpoint is the best, does not include them."""
    evaluate_every: MayChange[Size | None] = None
    """Steps from one measurement on the benchmarks to the next: a multiple of checkpoint_interval.
    The last checkpoint is measured too. null: none is."""
    benchmarks: MayChange[Annotated[tuple[str, ...], Field(strict=False)]] = ()
    """Tasks of the lm-evaluation-harness, such as hellaswag (the extra `eval`), and files of
    multiple-choice items, such as quiz.jsonl; paths start at the run folder."""
    benchmark_limit: MayChange[Size | None] = None
    """Items of each benchmark at most. null: all."""
    task_files: MayChange[str | None] = None
    """Folder with your own tasks for the lm-evaluation-harness, in YAML; its path starts at the run
    folder."""
    epochs: Size = 1
    """Number of passes over the training tokens."""
    max_steps: Size | None = None
    """Steps of the run at most, and of its learning-rate schedule; the order of the data stays that
    of all steps. null: all steps of the data."""
    max_minutes: Positive | None = None
    """Minutes that a run may take, with its compilation, validations and checkpoints: its first
    steps tell how many fit, at most those of its data. `length.jsonl` has the number, from which
    the learning rate follows; a resumed run keeps it. null: all steps of the data."""
    shuffle: bool | Literal["documents"] = False
    """Whether to shuffle the sequences, differently in each epoch; the order depends on seed.
    documents: the documents of a text are shuffled instead, each time it has been read through, and
    the windows then cut. A document ends with an end-of-text token or before one that begins
    texts."""
    windows: Windows = "consecutive"
    """Which windows of a text are its training sequences. consecutive: one after the other. random:
    each starts at a random token, all equally likely, as in nanoGPT; they depend on seed. Some
    tokens are then read more often than others, and an epoch, in epochs and min_train_tokens, is as
    many sequences as there are consecutive ones. Validation always has consecutive windows."""
    target_offset: Literal[0, 1] = 1
    """1: predict the next token. 0: predict the input token itself (A-to-A)."""
    skip_spikes: MayChange[bool] = False
    """Whether to skip the update of a step with a loss spike, leaving weights and optimizer state
    unchanged. A spike is a loss more than 1.5 times the median of up to 128 steps before it, and
    more than six standard deviations and 0.1 nats above that median."""
    watch_interval: MayChange[Size | None] = None
    """Steps from one measurement of the layers to the next, counted from step 0: size of weights,
    gradients, updates and activations, attention of each head, dead units, singular values, in
    layers.npy. A measurement takes the time of one or two steps, and a second compilation; the
    step itself and its results stay the same. 200 costs about 1% of the time. null: off."""
    documents: Literal["joined", "separate"] = "joined"
    """joined: a sequence of text runs on from one document to the next; a pair or a chat is a
    sequence of its own, padded. separate: a token attends to its own document only, its position is
    that in the document, and a sequence holds several pairs or chats. A document of text starts
    with the token that begins its texts, else with the end-of-text token before it."""
    packing: Literal["in_order", "best_fit"] = "in_order"
    """separate documents: which ones share a training sequence. in_order: a text is cut into
    windows; a sequence takes pairs or chats in the order of the file while they fit. best_fit: no
    document is cut unless it is longer than a sequence; the longest first, each goes where the
    least room is left (Ding et al. 2024, arXiv 2404.10830), and the rest is padding. Validation is
    in order."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Average the trained weights, in addition: the mean over all updates so far, those of k
    updates ago with the weight ema_decay^k. The average is validated beside the weights themselves,
    which decide what is best, and saved in each checkpoint as ema/. It takes the memory of another
    moment. null: off."""
    drop_rate: BelowOne = 0.0
    """Dropout rate after the embedding, on attention weights and on each sub-layer's output."""

    logits_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which the output head writes the logits of the training loss, which is computed in
    float32 from them. bfloat16, as in PyTorch's autocast, saves memory traffic on a GPU; it needs
    compute_dtype bfloat16 (or auto)."""

    matmul_dtype: Literal["float8"] | None = None
    """float8: the matmuls of the blocks multiply 8-bit floats, forward and backward, with delayed
    scaling (Micikevicius et al. 2022); everything else, the head too, stays in compute_dtype, and
    so do validation and generation. It is for models of a billion parameters or more on NVIDIA GPUs
    from compute capability 8.9; smaller ones get slower. A CPU emulates it, slowly. Needs
    compute_dtype bfloat16 (or auto); not with lora or experts. null: compute_dtype."""

    teacher: MayChange[str | None] = None
    """distill: the model to learn from: a run, a checkpoint, or a weights file, with the same
    vocabulary. It is read at each start and must stay the same, but may move."""
    teacher_temperature: Positive = 1.0
    """distill: divisor of the logits of both models in the KL divergence, whose gradient is scaled
    by its square (Hinton et al. 2015)."""
    teacher_top_k: Size | None = None
    """distill: how many of the teacher's most likely tokens to learn from at each place; all others
    count as one. They are read from files that `train.py RUN --store-teacher` writes once for all
    runs. null: all tokens, from the teacher beside each step."""
    hard_target_weight: Share = 0.0
    """distill: weight of the cross-entropy of the targets; the KL divergence has the rest of 1."""

    @check
    def _has_teacher(self) -> Iterator[str]:
        if self.objective == "distill" and self.teacher is None:
            yield 'teacher: needed by objective "distill"'
        if self.objective != "distill" and self.teacher is not None:
            yield f'teacher: is for objective "distill", not "{self.objective}"'

    @check
    def _fits_preferences(self) -> Iterator[str]:
        if not self.learns_preferences:
            return
        if self.has_reference and self.start_from is None:
            yield f'start_from: needed by objective "{self.objective}", as the reference'
        if self.documents == "separate":
            yield f'documents: "separate" is not supported with objective "{self.objective}"'
        if self.phases:
            yield f'dataset: phases are not supported with objective "{self.objective}"'
        if self.microbatch_size % 2:
            what = "an answer of kto" if self.objective == "kto" else "a pair"
            yield f"microbatch_size: {self.microbatch_size} is odd, but {what} is two sequences"

    @check
    def _packing_fits(self) -> Iterator[str]:
        is_packed, text = self.packing == "best_fit", 'does not go with packing "best_fit"; use'
        if is_packed and self.documents != "separate":
            yield f'documents: "{self.documents}" {text} "separate"'
        if is_packed and self.has_random_windows:
            yield f'windows: "random" {text} "consecutive"'
        if is_packed and self.shuffle == "documents":
            yield f'shuffle: "documents" {text} true, which shuffles sequences'

    @check
    def _dtypes_fit(self) -> Iterator[str]:
        is_wide = self.compute_dtype not in ("bfloat16", AUTO)
        if self.uses_float8 and is_wide:
            yield f'matmul_dtype: "float8" needs compute_dtype bfloat16, not {self.compute_dtype}'
        if self.logits_dtype == "bfloat16" and is_wide:
            yield f'logits_dtype: "bfloat16" gains nothing with compute_dtype {self.compute_dtype}'
        if self.uses_float8 and self.lora:
            yield 'matmul_dtype: "float8" is not supported with lora; remove one of the two'

    @check
    def _validated_once(self) -> Iterator[str]:
        """Check that no dataset is validated on twice."""
        names = [*self.datasets, *self.validation_datasets]
        if twice := next((name for name in names if names.count(name) > 1), None):
            place = " and is validated anyway" if twice in self.datasets else ""
            yield f"validation_datasets: {twice} is there already{place}; name each dataset once"

    @check
    def _benchmarks_are_due(self) -> Iterator[str]:
        """Check that benchmarks are given, and measured at steps with a checkpoint."""
        if self.benchmarks and self.evaluate_every is None:
            yield "evaluate_every: needed by benchmarks"
        if self.evaluate_every and not self.benchmarks:
            yield "benchmarks: evaluate_every needs at least one"
        if self.evaluate_every and self.evaluate_every % self.checkpoint_interval:
            yield (
                f"evaluate_every: {self.evaluate_every} is not a multiple of checkpoint_interval"
                f" ({self.checkpoint_interval})"
            )

    @check
    def _more_checkpoints_stay(self) -> Iterator[str]:
        if self.checkpoint_steps is not None and self.keep_checkpoints != -1:
            yield "checkpoint_steps: needs keep_checkpoints -1, or most of them would be deleted"

    @check
    def _batch_grows(self) -> Iterator[str]:
        steps, factors = [*map(int, self.batch_growth)], [*self.batch_growth.values()]
        if steps != sorted(set(steps)) or factors != sorted(set(factors)):
            found = ", ".join(f"{step}: {factor}" for step, factor in self.batch_growth.items())
            yield f"batch_growth: {found}: steps and factors must rise, as in 100: 2, 300: 4"

    @check
    def _phases_end(self) -> Iterator[str]:
        ends = [phase.until for phase in self.phases]
        if ends and (ends != sorted(set(ends)) or ends[-1] != 1):
            shown = ", ".join(f"{end:g}" for end in ends)
            yield f"dataset: until: {shown}: must rise to 1, as in 0.8, 1"
        is_timed, decay = self.max_minutes is not None, self.weight_decay_schedule
        for needs, is_so in (
            ("dataset has phases, which need", ends),
            ("group_schedules need", self.group_schedules),
            ("weight_decay_schedule needs", decay != "constant"),
        ):
            if is_timed and is_so:
                yield f"max_minutes: {needs} a known length; use max_steps"

    @property
    def sequences_per_step(self) -> int:
        """Sequences in a step, before batch_growth."""
        return self.microbatch_size * self.gradient_accumulation_steps

    @property
    def microbatches_per_step(self) -> int:
        """Microbatches in the largest step."""
        return self.gradient_accumulation_steps * max(self.batch_growth.values(), default=1)

    def sequences_before(self, step: int) -> int:
        batches, factor = step, 1
        for first, larger in self.batch_growth.items():
            batches += (larger - factor) * max(step - int(first), 0)
            factor = larger
        return batches * self.sequences_per_step

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the steps of all epochs, at most max_steps. With batch_growth an epoch may end
        inside a step."""
        steps = self.steps_of(self.sequences_before(steps_per_epoch) * self.epochs)
        return min(steps, self.max_steps or steps)

    def shortage(self, total_steps: int) -> str:
        """Return what to know if the epochs have fewer steps than max_steps, or nothing."""
        if self.max_steps is None or total_steps >= self.max_steps:
            return ""
        edit = "raise epochs" if self.min_train_tokens == -1 else "raise min_train_tokens or epochs"
        return f"max_steps is {self.max_steps:,}, but the epochs end before; {edit}"

    @property
    def more_checkpoints(self) -> set[int]:
        """The steps of checkpoint_steps."""
        if self.checkpoint_steps != "log":
            return {*(self.checkpoint_steps or ())}
        powers = (2**power for power in range(self.checkpoint_interval.bit_length()))
        return {step for step in powers if step < self.checkpoint_interval}

    @property
    def averaging_decay(self) -> float | None:
        return self.ema_decay

    @property
    def learns_preferences(self) -> bool:
        """Whether it learns from preferences, paired or not."""
        return self.objective in _BETAS

    @property
    def preferences(self) -> str:
        """The kind of preferences that its dataset must hold, in words."""
        if self.objective == "kto":
            return "unpaired preferences"
        return "preferences" if self.learns_preferences else "no preferences"

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares with the starting weights."""
        return self.objective in ("dpo", "ipo", "kto")

    @property
    def sequences_per_example(self) -> int:
        return 2 if self.learns_preferences else 1

    @property
    def preference_beta(self) -> float:
        """`beta`, or the default of the objective, which is one of preferences."""
        return self.beta or _BETAS[self.objective]

    @property
    def uses_float8(self) -> bool:
        """Whether matmuls of the blocks are in FP8."""
        return self.matmul_dtype == "float8"

    @property
    def has_random_windows(self) -> bool:
        """Whether the sequences of a text start at random tokens."""
        return self.windows == "random"

    @property
    def epochs_differ(self) -> bool:
        """Whether each epoch has other sequences than the last: random windows, or those of
        documents in another order."""
        return self.has_random_windows or self.shuffle == "documents"

    @property
    def datasets(self) -> dict[str, float]:
        """Each dataset's name with its weight in the mixture; with phases, its share of the run."""
        if isinstance(self.dataset, str):
            return {self.dataset: 1.0}
        if isinstance(self.dataset, dict):
            return self.dataset
        shares: dict[str, float] = {}
        begin = 0.0
        for phase in self.dataset:
            for name, weight in phase.weights.items():
                share = (phase.until - begin) * weight / sum(phase.weights.values())
                shares[name] = shares.get(name, 0) + share
            begin = phase.until
        return shares

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of a mixture whose weights change; empty for another dataset."""
        return self.dataset if isinstance(self.dataset, tuple) else ()

"""`train.json`: how a model is trained."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from rungs.common.strict_json import StrictModel
from rungs.config.base import Bytes, Config, CountOrAll, Positive, Size

TokenIndex = Annotated[int, Field(ge=0, le=2**62)]
Percent = Annotated[float, Field(ge=0, le=100)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Mixture = Annotated[dict[str, Positive], Field(min_length=1)]
NameOrMixture = Annotated[
    Annotated[str, Tag("(name)")] | Annotated[Mixture, Tag("(mixture)")],
    Discriminator(lambda value: "(mixture)" if isinstance(value, dict) else "(name)"),
]


_DEEPEST = 20
"""Objects and lists in one another, in what only a record of changes is."""
Mode = Literal["dp", "fsdp", "tp", "fsdp_tp"]


class ShardingConfig(StrictModel):
    """How the devices share the work: a mode, on a mesh of data × tensor devices."""

    mode: Mode = "dp"
    """dp: each device along `data` works on its part of every microbatch. fsdp: and keeps only its
    part of parameters and optimizer state (Zhao et al. 2023; ZeRO-3, Rajbhandari et al. 2019). tp:
    the devices along `tensor` share heads, hidden units and vocabulary (Shoeybi et al. 2019).
    fsdp_tp: both."""
    data: CountOrAll | None = None
    """Devices along the data axis, which must divide microbatch_size; -1 takes the rest. Absent: 1
    in tp, else the rest."""
    tensor: CountOrAll | None = None
    """Devices along the tensor axis; -1 takes the rest. Absent: 1 in dp and fsdp, else the
    rest."""

    CHECKS = ("_sizes_fit_mode",)

    def _sizes_fit_mode(self) -> str | None:
        data, tensor = self.sizes
        if (data, tensor) == (-1, -1):
            return f"mode {self.mode!r} needs data or tensor; one of them can be -1, for the rest"
        return mode_problem(self.mode, data, tensor)

    @property
    def sizes(self) -> tuple[int, int]:
        """Devices along data and tensor, -1 for the rest."""
        rest_of_tensor = -1 if "tp" in self.mode else 1
        data = self.data or (1 if self.mode == "tp" else -1)
        return data, self.tensor or rest_of_tensor


def mode_problem(mode: str, data: int, tensor: int) -> str | None:
    """What is wrong with a mode on so many devices along each axis, -1 for a number not known."""
    if mode in ("dp", "fsdp") and tensor != 1:
        return f"mode {mode!r} needs tensor 1, not {tensor}; fsdp_tp has both axes"
    if mode == "tp" and data != 1:
        return f"mode 'tp' needs data 1, not {data}; fsdp_tp has both axes"
    if mode == "fsdp_tp" and 1 in (data, tensor):
        other = "tp" if data == 1 else "fsdp"
        return (
            f"mode 'fsdp_tp' needs data and tensor above 1, not {data} and {tensor}; from 2 on, or"
            f" mode {other!r}"
        )
    return None


Remat = Literal["none", "dots", "full"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
ComputeDtypeOrAuto = Literal[ComputeDtype, "auto"]

Optimizer = Literal["adamw", "muon", "lion", "adafactor", "sgd"]
Schedule = Literal["cosine", "linear", "constant", "warmup_stable_decay"]

LoraTarget = Literal["query", "key", "value", "output", "gate", "up", "down"]
ATTENTION_TARGETS: tuple[LoraTarget, ...] = ("query", "key", "value", "output")


class LoraConfig(StrictModel):
    """Low-rank adaptation: the model's own weights stay, and beside each targeted projection W a
    product A·B of low rank is trained: y = x·W + (alpha ÷ rank) · x·A·B (Hu et al. 2021)."""

    rank: Size
    """Rank of A·B."""
    alpha: Positive
    """A·B is scaled by alpha ÷ rank."""
    targets: Annotated[list[LoraTarget], Field(min_length=1)]
    """The projections that get one, in every block: query, key, value and output of attention;
    gate, up and down of the feed-forward part."""


def _writable(values: dict[str, Any]) -> dict[str, Any]:
    """What can be written into a checkpoint and read again: strictly speaking, JSON."""
    if not _is_writable(values, _DEEPEST):
        raise ValueError("must be finite numbers and nothing nested deeply")
    return values


def _is_writable(value: Any, depth: int) -> bool:
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_writable(part, depth - 1) for part in parts)
    return not isinstance(value, float) or math.isfinite(value)


class Lineage(StrictModel):
    """Where a run folder made by `train.py --like` came from."""

    like: str
    """The run folder that was copied."""
    set: Annotated[dict[str, Any], AfterValidator(_writable)]
    """The keys that were changed, with their new values."""


class TrainConfig(Config):
    """How a model is trained."""

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        {
            "schema_address",
            "lineage",
            "tokenizer",
            "checkpoint_interval",
            "keep_checkpoints",
            "max_weights_file_bytes",
            "chart_style",
            "validation_tokens",
            "start_val_token",
            "sharding",
            "remat",
            "scan_unroll",
            "deterministic",
            "max_non_finite_steps",
            "skip_spikes",
        }
    )
    """Keys that may differ between two starts of one run: they change neither the mathematics
    nor the order of the data, but for steps that have gone wrong."""

    dataset: NameOrMixture
    """Name of a dataset: `python-stdlib` (built in), a folder under `datasets/`, or a hub id
    `owner/name`. Or a mixture: `{"name": weight, …}`."""
    microbatch_size: Size
    """Sequences in one microbatch, over all devices together."""
    learning_rate: Positive
    """Peak learning rate."""
    checkpoint_interval: Size
    """Steps between checkpoints, counted from step 0; the last step always has one."""
    start_from: str | None = None
    """Whose weights to start from: "imported", what `pretrained.py import` put into this run's
    folder; or a run, a checkpoint or a model.safetensors. null: fresh ones."""
    lora: LoraConfig | None = None
    """Train a low-rank addition to the weights instead of the weights: `{"rank": 8, "alpha": 16,
    "targets": ["query", "value"]}`. Needs start_from, and no mup."""
    sequence_length: Size | None = None
    """Tokens in a training sequence; the model's context_length where absent."""
    tokenizer: str = "gpt2"
    """Hub id of the tokenizer of datasets that come without one; others bring their own."""
    gradient_accumulation_steps: Size = 1
    """Microbatches per step: the step's batch is this many times microbatch_size sequences."""
    min_train_tokens: CountOrAll = -1
    """Tokens to train on in each epoch, rounded up to whole steps; -1 takes all whole steps."""
    start_train_token: TokenIndex = 0
    """Index in the training tokens at which to start."""
    start_val_token: TokenIndex = 0
    """Index in the validation tokens at which to start."""
    validation_tokens: Size = 524_288
    """At most this many tokens are read in each validation, rounded up to a whole sequence."""
    epochs: Size = 1
    """How often to go through the training tokens."""
    shuffle: bool = False
    """Whether to visit the sequences in a random order, another in each epoch, drawn from seed."""
    target_offset: Literal[0, 1] = 1
    """1: predict the next token. 0: predict the input itself (A-to-A)."""
    optimizer: Optimizer = "adamw"
    """How weights follow gradients. adamw (Loshchilov & Hutter 2019). muon (Jordan et al. 2024):
    for the kernels of the blocks, scaled so that it takes AdamW's learning rates (Liu et al. 2025),
    with AdamW for embeddings, head, norms, biases and routers. lion (Chen et al. 2023), which wants
    a learning rate some three to ten times lower. adafactor (Shazeer & Stern 2018), which keeps the
    least. sgd, with momentum."""
    schedule: Schedule = "cosine"
    """How the learning rate falls after the warm-up, to min_learning_rate_percent at the end:
    along a cosine (Loshchilov & Hutter 2017), linear, constant (not at all), or
    warmup_stable_decay: constant, then linear in the last decay_period_percent (Hu et al. 2024)."""
    decay_period_percent: Percent = 20.0
    """warmup_stable_decay: share of all steps, at the end, in which the learning rate falls."""
    warmup_period_percent: Percent = 5.0
    """Share of all steps in which the learning rate rises to its peak."""
    start_learning_rate_percent: Percent = 0.001
    """Learning rate at step 0, as a share of the peak."""
    min_learning_rate_percent: Percent = 10.0
    """Learning rate at the end of the schedule, as a share of the peak."""
    beta1: BelowOne = 0.9
    """adamw, muon's AdamW, lion: decay of the mean of gradients (lion: in the update)."""
    beta2: BelowOne = 0.999
    """adamw, muon's AdamW: decay of the mean of squared gradients. lion: of that of gradients,
    published with 0.99."""
    epsilon: Positive = 1e-8
    """adamw, muon's AdamW: added to the root of the mean of squared gradients."""
    momentum: BelowOne = 0.95
    """muon: decay of the mean of gradients. sgd: of their sum."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay: in a step, learning rate × this is taken off each weight."""
    decayed_parameters: Literal["matrices", "all"] = "matrices"
    """What weight decay acts on: kernels and embeddings only, or biases and norms as well."""
    clipping_max_norm: Positive | None = None
    """Largest global norm of a step's gradient; a larger one is scaled down to it. null: off."""
    skip_spikes: bool = False
    """Whether a step whose loss is a spike leaves weights and optimizer state as they are. A spike
    is more than 1.5 times the median of up to 128 steps before, more than six standard deviations
    above it, and more than 0.1 nats."""
    max_non_finite_steps: Size = 10
    """Stop after so many steps in a row in which every microbatch had a loss or gradient that was
    NaN or infinite."""
    drop_rate: BelowOne = 0.0
    """Dropout after the embedding, on attention weights and on each sub-layer's output."""
    load_balancing_weight: Annotated[float, Field(ge=0)] = 0.01
    """Mixture of experts: what the load-balancing loss (Fedus et al. 2021, equation 4) counts in
    the gradient, beside the cross-entropy."""
    compute_dtype: ComputeDtypeOrAuto = "auto"
    """Type of activations and matrix products; weights, sums and the loss stay float32. float16
    comes with dynamic loss scaling. auto: the fastest that is safe on the device that the run
    starts on, bfloat16 where it has instructions for it; checkpoints record which, and later starts
    keep it."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the initial weights, of dropout and of shuffling."""
    deterministic: bool = False
    """Ask an accelerator for bit-reproducible operations (slower); a CPU always has them."""
    sharding: ShardingConfig | None = None
    """How devices share the work: `{"mode": "fsdp_tp", "data": 4, "tensor": 2}`. null:
    data-parallel over all devices (on a CPU one per core) where microbatch_size divides by them,
    else one device."""
    remat: Remat = "dots"
    """What of a layer's forward pass the backward pass computes again. dots: all but products and
    attention, which is little work, and less to keep and to fetch. none: nothing. full: all of it,
    which takes the least memory (Chen et al. 2016)."""
    scan_unroll: Size = 1
    """Layers, or periods of layer_pattern, compiled one after the other in each turn of the loop
    over them: more may run faster, and takes longer to compile. In fsdp keep it below their number:
    without a loop the compiler gathers all layers' weights at once, in the memory that fsdp
    spares."""
    keep_checkpoints: CountOrAll = 3
    """How many of the latest checkpoints to keep, besides the best; -1 keeps all."""
    max_weights_file_bytes: Bytes = 5_000_000_000
    """Weights of more bytes are saved in several files, none larger but for a single tensor, with
    an index: model-00001-of-0000N.safetensors and model.safetensors.index.json, as the Hugging Face
    hub has it, instead of model.safetensors."""
    chart_style: Literal["plain", "hand-drawn"] = "plain"
    """Look of the charts."""
    lineage: Lineage | None = None
    """Written by `train.py --like`."""

    CHECKS = ("_microbatch_divides", "_lora_has_a_base", "_muon_has_kernels")

    def _microbatch_divides(self) -> str | None:
        data = self.sharding.sizes[0] if self.sharding else -1
        return None if data == -1 else indivisible_microbatch(self, data)

    def _lora_has_a_base(self) -> str | None:
        if self.lora and self.start_from is None:
            return 'lora: needs start_from, the weights that it adapts, as "imported"'
        return None

    def _muon_has_kernels(self) -> str | None:
        if self.lora and self.optimizer == "muon":
            return 'optimizer: "muon" is for kernels, but lora trains none; take "adamw"'
        return None

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one global step."""
        return self.microbatch_size * self.gradient_accumulation_steps

    @property
    def datasets(self) -> dict[str, float]:
        """Each dataset's name with its weight in the mixture."""
        return self.dataset if isinstance(self.dataset, dict) else {self.dataset: 1.0}


def indivisible_microbatch(train: TrainConfig, data: int) -> str | None:
    """What is wrong with a microbatch on so many devices along the data axis."""
    size = train.microbatch_size
    if size % data == 0:
        return None
    near = [count for count in (size // data * data, -(-size // data) * data) if count]
    return (
        f"microbatch_size: {size} does not divide by the {data} devices of sharding.data;"
        f" {' or '.join(map(str, near))} would"
    )

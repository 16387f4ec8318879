"""`train.json`: how a model is trained."""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

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


_MAX_NESTING = 20
"""Levels of objects and lists in the values of `lineage`."""
Mode = Literal["dp", "fsdp", "tp", "fsdp_tp", "cp"]


class ShardingConfig(StrictModel):
    """How devices share the work: a mode, and a mesh of data × tensor devices; in cp, data ×
    context."""

    mode: Mode = "dp"
    """dp (data parallelism): each device along `data` computes its share of every microbatch; on
    accelerators it stores only its shard of the optimizer state (ZeRO-1, Rajbhandari et al. 2019).
    fsdp: it stores only its shard of the parameters, too (ZeRO-3; Zhao et al. 2023). tp (tensor
    parallelism): the devices along `tensor` divide heads, hidden units and vocabulary (Shoeybi et
    al. 2019). fsdp_tp: fsdp along `data` and tp along `tensor`. cp (context parallelism), for long
    sequences: the devices along `context` divide the tokens of every sequence and, during
    attention, the heads (Jacobs et al. 2023); all devices together shard parameters and optimizer
    state as in fsdp."""
    data: CountOrAll | None = None
    """Devices along the data axis; must divide microbatch_size. -1: all remaining devices. Absent:
    1 in tp and cp, otherwise all remaining devices."""
    tensor: CountOrAll | None = None
    """Devices along the tensor axis. -1: all remaining devices. Absent: all remaining devices in tp
    and fsdp_tp, otherwise 1."""
    context: Annotated[CountOrAll | None, Field(exclude_if=lambda size: size is None)] = None
    """Devices along the context axis, in cp; must divide sequence_length and n_heads. -1 or absent:
    all remaining devices."""

    CHECKS = ("_sizes_fit_mode",)

    def _sizes_fit_mode(self) -> str | None:
        if self.sizes == (-1, -1):
            last = self.axes[1]
            return f"mode {self.mode!r} needs data or {last}; one of them may be -1 (all remaining)"
        if self.mode == "cp" and self.tensor not in (None, 1):
            return f"mode 'cp' needs tensor 1, not {self.tensor}"
        if self.mode != "cp" and self.context not in (None, 1):
            return f"mode {self.mode!r} needs context 1, not {self.context}; or use mode 'cp'"
        return mode_problem(self.mode, *self.sizes)

    @classmethod
    def of(cls, mode: Mode, sizes: tuple[int, int]) -> Self:
        """Return the sharding of a mode on a mesh with these sizes."""
        return cls.model_validate({"mode": mode, **dict(zip(mesh_axes(mode), sizes, strict=True))})

    @property
    def axes(self) -> tuple[str, str]:
        """The names of the mesh axes."""
        return mesh_axes(self.mode)

    @property
    def sizes(self) -> tuple[int, int]:
        """Devices along both mesh axes; -1 for all remaining devices."""
        data = self.data or (1 if self.mode in ("tp", "cp") else -1)
        if self.mode == "cp":
            return data, self.context or -1
        return data, self.tensor or (-1 if "tp" in self.mode else 1)

    @property
    def text(self) -> str:
        """The mesh in words, such as "data 4 × tensor 2"."""
        sizes = zip(self.axes, self.sizes, strict=True)
        return " × ".join(f"{axis} {size}" for axis, size in sizes)


def mesh_axes(mode: str) -> tuple[str, str]:
    """Return the names of a mode's mesh axes. Devices along the last one are closest together."""
    return "data", "context" if mode == "cp" else "tensor"


def mode_problem(mode: str, data: int, last: int) -> str | None:
    """Return what is wrong with a mode on a mesh of these sizes along `mesh_axes` (-1: unknown), if
    anything."""
    if mode == "cp":
        return None if last != 1 else "mode 'cp' needs context of at least 2; or use mode 'fsdp'"
    return _data_tensor_problem(mode, data, last)


def _data_tensor_problem(mode: str, data: int, tensor: int) -> str | None:
    if mode in ("dp", "fsdp") and tensor != 1:
        return f"mode {mode!r} needs tensor 1, not {tensor}; for both axes use 'fsdp_tp'"
    if mode == "tp" and data != 1:
        return f"mode 'tp' needs data 1, not {data}; for both axes use 'fsdp_tp'"
    if mode == "fsdp_tp" and 1 in (data, tensor):
        other = "tp" if data == 1 else "fsdp"
        return (
            f"mode 'fsdp_tp' needs data and tensor of at least 2, not {data} and {tensor}; or use"
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
    """Low-rank adaptation, LoRA (Hu et al. 2021): the model's own weights are frozen. For each
    targeted projection W, two small matrices A and B are trained:
    y = x·W + (alpha ÷ rank) · x·A·B."""

    rank: Size
    """Rank of the adapters. Each adds (alpha ÷ rank) · x·A·B to the output of a projection; rank is
    the inner dimension of A·B."""
    alpha: Positive
    """Scale of the adapters: A·B is multiplied by alpha ÷ rank."""
    targets: Annotated[list[LoraTarget], Field(min_length=1)]
    """The projections to adapt in every block: query, key, value and output of attention; gate, up
    and down of the feed-forward sub-layer."""


def _writable(values: dict[str, Any]) -> dict[str, Any]:
    """Return values that can be written to a checkpoint and read back: strict JSON."""
    if not _is_writable(values, _MAX_NESTING):
        raise ValueError("must have only finite numbers and no deep nesting")
    return values


def _is_writable(value: Any, depth: int) -> bool:
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_writable(part, depth - 1) for part in parts)
    return not isinstance(value, float) or math.isfinite(value)


class Lineage(StrictModel):
    """The run folder that `train.py --like` copied, and the changes."""

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
    """Keys that may change when a run is resumed. They change neither the mathematics nor the order
    of the data; two of them decide what happens in a failed step."""

    dataset: NameOrMixture
    """Name of a dataset: `python-stdlib` (built in), a folder under `datasets/`, or a Hugging Face
    id `owner/name`. Or a mixture of datasets: `{"name": weight, …}`."""
    microbatch_size: Size
    """Sequences in one microbatch, counted over all devices."""
    learning_rate: Positive
    """Peak learning rate."""
    checkpoint_interval: Size
    """Steps between checkpoints, counted from step 0. The last step always has a checkpoint."""
    start_from: str | None = None
    """Weights to start from: "imported" (the model that `pretrained.py import` wrote to this run
    folder), or the path of a run folder, a checkpoint or a model.safetensors. null: random
    weights."""
    lora: LoraConfig | None = None
    """LoRA: train low-rank adapters instead of the weights themselves: `{"rank": 8, "alpha": 16,
    "targets": ["query", "value"]}`. Needs start_from, and no mup."""
    sequence_length: Size | None = None
    """Tokens in a training sequence. Absent: the model's context_length."""
    tokenizer: str = "gpt2"
    """Hugging Face id of the tokenizer for datasets that do not come with one."""
    gradient_accumulation_steps: Size = 1
    """Microbatches in a step: a step trains on this many × microbatch_size sequences."""
    min_train_tokens: CountOrAll = -1
    """Tokens to train on in each epoch, rounded up to full steps. -1: as many full steps as the
    data has."""
    start_train_token: TokenIndex = 0
    """Index of the first training token to use."""
    start_val_token: TokenIndex = 0
    """Index of the first validation token to use."""
    validation_tokens: Size = 524_288
    """Maximum number of tokens in each validation, rounded up to full sequences."""
    epochs: Size = 1
    """Number of passes over the training tokens."""
    shuffle: bool = False
    """Whether to shuffle the sequences, differently in each epoch. The order depends on seed."""
    target_offset: Literal[0, 1] = 1
    """1: predict the next token. 0: predict the input token itself (A-to-A)."""
    optimizer: Optimizer = "adamw"
    """adamw (Loshchilov & Hutter 2019). muon (Jordan et al. 2024): for the kernels of the blocks,
    scaled to work with AdamW's learning rates (Liu et al. 2025); embeddings, head, norms, biases
    and routers use AdamW. lion (Chen et al. 2023): needs a learning rate three to ten times lower.
    adafactor (Shazeer & Stern 2018): has the smallest optimizer state. sgd: with momentum."""
    schedule: Schedule = "cosine"
    """How the learning rate falls to min_learning_rate_percent after the warm-up. cosine
    (Loshchilov & Hutter 2017). linear. constant: it does not fall. warmup_stable_decay: constant,
    then linear in the last decay_period_percent of the steps (Hu et al. 2024)."""
    decay_period_percent: Percent = 20.0
    """warmup_stable_decay: the percentage of all steps, at the end, in which the learning rate
    falls."""
    warmup_period_percent: Percent = 5.0
    """The percentage of all steps, at the start, in which the learning rate rises to its peak."""
    start_learning_rate_percent: Percent = 0.001
    """Learning rate at step 0, as a percentage of the peak."""
    min_learning_rate_percent: Percent = 10.0
    """Learning rate at the end of the schedule, as a percentage of the peak."""
    beta1: BelowOne = 0.9
    """adamw and muon's AdamW: decay of the running mean of gradients. lion: weight of that mean in
    the update."""
    beta2: BelowOne = 0.999
    """adamw and muon's AdamW: decay of the running mean of squared gradients. lion: decay of the
    running mean of gradients, 0.99 in its paper."""
    epsilon: Positive = 1e-8
    """adamw and muon's AdamW: added to the root of the mean of squared gradients."""
    momentum: BelowOne = 0.95
    """muon: decay of the running mean of gradients. sgd: decay of their running sum."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay: each step subtracts learning rate × this × the weight."""
    decayed_parameters: Literal["matrices", "all"] = "matrices"
    """Which parameters weight decay applies to. matrices: kernels and embeddings. all: biases and
    norms too."""
    clipping_max_norm: Positive | None = None
    """The largest global norm of a step's gradient. A larger gradient is scaled down to it. null:
    off."""
    skip_spikes: bool = False
    """Whether to skip the update of a step with a loss spike, leaving weights and optimizer state
    unchanged. A spike is a loss more than 1.5 times the median of up to 128 steps before it, and
    more than six standard deviations and 0.1 nats above that median."""
    max_non_finite_steps: Size = 10
    """Stop after this many steps in a row in which every microbatch had a NaN or infinite loss or
    gradient."""
    drop_rate: BelowOne = 0.0
    """Dropout rate after the embedding, on attention weights and on each sub-layer's output."""
    load_balancing_weight: Annotated[float, Field(ge=0)] = 0.01
    """Mixture of experts: weight of the load-balancing loss (Fedus et al. 2021, equation 4), which
    is added to the cross-entropy."""
    compute_dtype: ComputeDtypeOrAuto = "auto"
    """Dtype of activations and matmuls. Weights, sums and the loss stay float32. float16 uses
    dynamic loss scaling. auto: the fastest safe dtype of the device on which the run starts:
    bfloat16 if it has instructions for that, float16 on GPUs without bfloat16, otherwise
    float32. Checkpoints record the choice, and resuming keeps it."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the initial weights, dropout and shuffling."""
    deterministic: bool = False
    """Use bit-reproducible operations on an accelerator, which are slower. CPUs always do."""
    sharding: ShardingConfig | None = None
    """How devices share the work: `{"mode": "fsdp_tp", "data": 4, "tensor": 2}`. null: data
    parallelism over as many devices as divide microbatch_size. On a CPU there is a virtual device
    per core, at most 8, and fewer if their copies of the weights would take much of the memory."""
    remat: Remat = "dots"
    """Which parts of a layer's forward pass are recomputed in the backward pass. dots: everything
    but matmuls and attention; this is cheap and saves memory. none: nothing. full: everything,
    which takes the least memory (Chen et al. 2016)."""
    scan_unroll: Size = 1
    """How many layers (or periods of layer_pattern) to unroll in each iteration of the loop over
    layers. More may run faster but takes longer to compile. In fsdp, keep it below the number of
    layers: without a loop the compiler all-gathers the weights of all layers at once, which undoes
    the memory savings of fsdp."""
    keep_checkpoints: CountOrAll = 3
    """How many of the latest checkpoints to keep, in addition to the best. If the next one would
    not fit on the disk, one fewer while it is written, but at least one. -1: all."""
    max_weights_file_bytes: Bytes = 5_000_000_000
    """Weights larger than this are saved in several files of at most this many bytes (more only if
    a single tensor is larger) with an index, as on the Hugging Face hub:
    model-00001-of-0000N.safetensors and model.safetensors.index.json instead of
    model.safetensors."""
    chart_style: Literal["plain", "hand-drawn"] = "plain"
    """Style of the charts."""
    lineage: Lineage | None = None
    """The run that `train.py --like` copied, and the keys that it changed. Written by train.py."""

    CHECKS = ("_microbatch_divides", "_lora_has_start_weights", "_muon_trains_kernels")

    def _microbatch_divides(self) -> str | None:
        data = self.sharding.sizes[0] if self.sharding else -1
        return None if data == -1 else indivisible_microbatch(self, data)

    def _lora_has_start_weights(self) -> str | None:
        if self.lora and self.start_from is None:
            return 'lora: needs start_from, the weights to adapt, for example "imported"'
        return None

    def _muon_trains_kernels(self) -> str | None:
        if self.lora and self.optimizer == "muon":
            return 'optimizer: "muon" is for kernels, but lora trains none; use "adamw"'
        return None

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one step."""
        return self.microbatch_size * self.gradient_accumulation_steps

    @property
    def datasets(self) -> dict[str, float]:
        """Each dataset's name with its weight in the mixture."""
        return self.dataset if isinstance(self.dataset, dict) else {self.dataset: 1.0}


def indivisible_microbatch(train: TrainConfig, data: int) -> str | None:
    """Return what is wrong with microbatch_size for a number of devices along the data axis, if
    anything."""
    return indivisible("microbatch_size", train.microbatch_size, data, "data")


def indivisible(key: str, size: int, parts: int, *mesh_axes: str) -> str | None:
    """Return what is wrong with a size that the devices along mesh axes must divide, if anything.

    Args:
        parts: how many devices these are.
    """
    if size % parts == 0:
        return None
    below = size // parts * parts
    near = [below, below + parts] if below else [parts]
    axes = " × ".join(f"sharding.{axis}" for axis in mesh_axes)
    return (
        f"{key}: {size} is not divisible by the {parts} devices of {axes};"
        f" use {' or '.join(map(str, near))}"
    )

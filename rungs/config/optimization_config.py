"""Keys that `train.json` and `reinforce.json` share: optimizer, schedule, precision, devices,
checkpoints."""

import bisect
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rungs.common.strict_json import StrictModel, check
from rungs.config import base
from rungs.config.option_values import ChartStyle
from rungs.config.sharding_config import ShardingConfig, indivisible

Percent = Annotated[float, Field(ge=0, le=100)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]

Remat = Literal["none", "activations", "dots", "full"]
RematOrAuto = Literal[Remat, "auto"]
AttentionKernel = Literal["cudnn", "splash", "triton", "mosaic", "blockwise"]
AttentionKernelOrAuto = Literal[AttentionKernel, "auto"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
ComputeDtypeOrAuto = Literal[ComputeDtype, "auto"]

BUILT_IN_OPTIMIZERS = ("adamw", "muon", "lion", "adafactor", "sgd")
Schedule = Literal["cosine", "linear", "constant", "warmup_stable_decay"]
Orthogonalization = Literal["newton_schulz", "polar_express"]
Group = Literal["embedding", "head", "matrices", "vectors", "residual_scale", "embedding_skip"]

LoraTarget = Literal["query", "key", "value", "output", "gate", "up", "down"]
ATTENTION_TARGETS: tuple[LoraTarget, ...] = ("query", "key", "value", "output")


class LoraConfig(StrictModel):
    """Low-rank adaptation, LoRA (Hu et al. 2021): the model's own weights are frozen. For each
    targeted projection W, two small matrices A and B are trained:
    y = x·W + (alpha ÷ rank) · x·A·B."""

    rank: base.Size
    """Rank of the adapters. Each adds (alpha ÷ rank) · x·A·B to the output of a projection; rank is
    the inner dimension of A·B."""
    alpha: base.Positive
    """Scale of the adapters: A·B is multiplied by alpha ÷ rank."""
    targets: Annotated[list[LoraTarget], Field(min_length=1)]
    """The projections to adapt in every block: query, key, value and output of attention; gate, up
    and down of the feed-forward sub-layer."""


class LearningRateMultipliers(StrictModel):
    """Factors on the learning rate, at every step, of groups of parameters. Weight decay has them
    too, as it is a multiple of the learning rate."""

    embedding: base.Positive = 1.0
    """Token embedding, which may be the head as well, learned positions and value embeddings."""
    head: base.Positive = 1.0
    """The output head."""
    matrices: base.Positive = 1.0
    """Kernels of the blocks, and their adapters."""
    vectors: base.Positive = 1.0
    """Scales and biases, and the gates of value embeddings."""
    residual_scale: base.Positive = 1.0
    """λ_r of residual_scalars."""
    embedding_skip: base.Positive = 1.0
    """λ_0 of residual_scalars."""


class Lineage(StrictModel):
    """The run folder that `train.py --like` copied, or the preset, and the changes."""

    like: str
    """The run folder that was copied; with `--preset`, the preset's name."""
    set: dict[str, Any]
    """The keys that were changed, with their new values."""
    from_step: Annotated[int, Field(ge=0)] | None = None
    """With `--from-step`: the step whose checkpoint this run continues, with its optimizer state.
    null: it starts anew."""
    warmup_of: Annotated[int, Field(ge=1)] | None = None
    """With `--from-step`: the steps of which warmup_period_percent is the percentage: all of the
    other run's, so that its warm-up goes on or stays over. null: all steps of this run, as without
    a branch, or if `set` has warmup_period_percent."""


class OptimizationConfig(base.Config):
    """How a model is optimized, whatever the objective. The base class of `TrainConfig` and
    `ReinforceConfig`."""

    SAMPLES: ClassVar[bool] = False
    """Whether a run trains on texts that its model generates."""

    microbatch_size: base.Size
    """Sequences in one microbatch, counted over all devices."""
    learning_rate: base.Positive
    """Peak learning rate."""
    learning_rate_multipliers: LearningRateMultipliers | None = None
    """Other learning rates for groups of parameters, as factors: `{"embedding": 3, "head": 2}`.
    They multiply what schedule, mup and optimizer make of the learning rate. null: one learning
    rate for all."""
    group_schedules: dict[Group, Schedule] = Field(default={})
    """Other schedules for groups of parameters, with the names of learning_rate_multipliers:
    `{"embedding": "constant"}`. Warm-up and percentages are those of all."""
    group_beta2: dict[Group, BelowOne] = Field(default={})
    """adamw and muon's AdamW: other values of beta2 for groups of parameters, with the names of
    learning_rate_multipliers: `{"embedding": 0.95}`."""
    checkpoint_interval: base.MayChange[base.Size]
    """Steps between checkpoints, counted from step 0. The last step always has a checkpoint."""
    start_from: str | None = None
    """Weights to start from: "imported" (the model that `pretrained.py import` wrote to this run
    folder), or the path of a run folder, a checkpoint or a model.safetensors. null: random
    weights."""
    lora: LoraConfig | None = None
    """LoRA: train low-rank adapters instead of the weights themselves: `{"rank": 8, "alpha": 16,
    "targets": ["query", "value"]}`. Needs start_from, and no mup."""
    sequence_length: base.Size | None = None
    """Tokens in a training sequence. Absent: the model's context_length."""
    optimizer: Annotated[str, Field(examples=list(BUILT_IN_OPTIMIZERS))] = "adamw"
    """adamw (Loshchilov & Hutter 2019). muon (Jordan et al. 2024): for the kernels of the blocks,
    scaled to work with AdamW's learning rates (Liu et al. 2025); embeddings, head, norms, biases
    and routers use AdamW. lion (Chen et al. 2023): needs a learning rate three to ten times lower.
    adafactor (Shazeer & Stern 2018): has the smallest optimizer state. sgd: with momentum.
    Or the name of an optimizer that another installed package adds."""
    schedule: Schedule = "cosine"
    """How the learning rate falls to min_learning_rate_percent after the warm-up. cosine
    (Loshchilov & Hutter 2017). linear. constant: it does not fall. warmup_stable_decay: constant,
    then linear in the last decay_period_percent of the steps (Hu et al. 2024)."""
    decay_period_percent: Percent = 20.0
    """warmup_stable_decay: the percentage of all steps, at the end, in which the learning rate
    falls."""
    warmup_period_percent: Percent = 5.0
    """The percentage of all steps, at the start, in which the learning rate rises to its peak; in a
    branch, of all steps of the run that it continues, unless `--set` changes it."""
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
    epsilon: base.Positive = 1e-8
    """adamw and muon's AdamW: added to the root of the mean of squared gradients."""
    momentum: BelowOne = 0.95
    """muon: decay of the running mean of gradients m; momentum · m + (1 − momentum) · gradient is
    made orthogonal. As in Optax, m and the gradient are divided by 1 − momentum^(t + 1) and
    1 − momentum^t first, t updates after the start. Jordan's code, which published recipes mean,
    doesn't do so, which changes the first updates a little: weights by 1.7e-3 after six with a
    learning rate of 0.03. sgd: decay of the running sum of gradients."""
    momentum_warmup_steps: base.Size | None = None
    """muon: updates in which the momentum rises linearly from start_momentum to momentum, 300 in
    modded-nanogpt. null: it is always the same."""
    start_momentum: BelowOne = 0.85
    """muon: momentum of the first update, with momentum_warmup_steps."""
    orthogonalization: Orthogonalization = "newton_schulz"
    """muon: the five polynomials that bring the singular values of an update near 1. newton_schulz:
    the same each time (Jordan et al. 2024), which leaves them between 0.7 and 1.2. polar_express:
    the best for each iteration (Amsel et al. 2025)."""
    normuon_beta2: BelowOne | None = None
    """muon: divide the orthogonalized update by the root of a running mean of its squares for each
    output, and scale it to the same size as without that (NorMuon, Li et al. 2025). The decay of
    that mean, 0.95 in the paper. null: off."""
    weight_decay: base.NotNegative = 0.01
    """Decoupled weight decay: each step subtracts learning rate × this × the weight."""
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How weight_decay changes over all steps: not, or to 0. Each step's is multiplied by the
    learning rate, as ever."""
    cautious_weight_decay: bool = False
    """Whether weights decay only where the update moves them towards 0 as well (Chen et al.
    2025)."""
    decayed_parameters: Literal["matrices", "all"] = "matrices"
    """Which parameters weight decay applies to. matrices: kernels and embeddings. all: biases and
    norms too."""
    clipping_max_norm: base.Positive | None = None
    """The largest global norm of a step's gradient. A larger gradient is scaled down to it. null:
    off."""
    max_non_finite_steps: base.MayChange[base.SizeOrNever] = 10
    """Stop after this many steps in a row in which every microbatch had a NaN or infinite loss or
    gradient. never: train on, with a warning for each."""
    load_balancing_weight: base.NotNegative = 0.01
    """Mixture of experts: weight of the load-balancing loss (Fedus et al. 2021, equation 4), which
    is added to the cross-entropy; none with balance_bias."""
    balance_bias_rate: base.NotNegative = 0.001
    """Mixture of experts with balance_bias: how much the bias of each expert changes after a step
    (Wang et al. 2024, section 3.2)."""
    compute_dtype: ComputeDtypeOrAuto = "auto"
    """Dtype of activations and matmuls. Weights, sums and the loss stay float32. float16 uses
    dynamic loss scaling. auto: the fastest safe dtype of the device on which the run starts:
    bfloat16 if it is faster there, float16 on GPUs without bfloat16, otherwise
    float32. Checkpoints record the choice, and resuming keeps it."""
    attention_kernel: AttentionKernelOrAuto = "auto"
    """What computes attention over full sequences without dropout. Results differ by rounding.
    auto: the fastest that is tested on the device and has what the model needs. mosaic: tokamax's
    kernels for NVIDIA's Hopper and Blackwell (Python 3.12 or later), compiled but not yet run on
    one. cudnn, triton, splash (TPU) or blockwise, by XLA: that one, to compare."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the initial weights, dropout, shuffling and random windows."""
    deterministic: base.MayChange[bool] = False
    """Use bit-reproducible operations on an accelerator, which are slower. CPUs always do."""
    sharding: base.MayChange[ShardingConfig | None] = None
    """How devices share the work: `{"mode": "fsdp_tp", "data": 4, "tensor": 2}`. null: data
    parallelism over as many devices as divide microbatch_size. In train.json a CPU is one device,
    whose cores share each operation; `{"mode": "dp"}` makes a virtual device of each core. In
    reinforce.json, which samples texts, it has a virtual device per core, at most 8, and fewer if
    their copies of the weights would take much of the memory."""
    remat: base.MayChange[RematOrAuto] = base.AUTO
    """Which parts of a layer's forward pass are recomputed in the backward pass. dots: everything
    but matmuls and attention; this is cheap and saves memory. activations: as dots, but activations
    of feed-forward layers, what norms return and sums with the residual stream are kept, too; a GPU
    then reads and writes less, and a step takes up to half more memory. none: nothing. full:
    everything, which takes the least memory (Chen et al. 2016). auto: none on a CPU if all layers
    are unrolled and its memory is large enough for what they keep; otherwise dots."""
    scan_unroll: base.MayChange[base.SizeOrAuto] = base.AUTO
    """How many layers (or periods of layer_pattern) to unroll in each iteration of the loop over
    layers. More may run faster but takes longer to compile. In fsdp, keep it below the number of
    layers: without a loop the compiler all-gathers the weights of all layers at once, which undoes
    the memory savings of fsdp. auto: all, if there are at most 12 layers on a CPU or 24 on a GPU
    and the mode is not fsdp, fsdp_tp or cp. On a GPU remat must not be full; on a CPU it must be
    none or auto, and what is then kept must take at most half of the memory. Otherwise 1."""
    keep_checkpoints: base.MayChange[base.CountOrAll] = 3
    """How many of the latest checkpoints to keep, in addition to the best and that of step 0. If
    the next one would not fit on the disk, as many fewer as it takes, but the best and the newest
    valid one stay. -1: all."""
    max_weights_file_bytes: base.MayChange[base.Bytes] = 5_000_000_000
    """Weights larger than this are saved in several files of at most this many bytes (more only if
    a single tensor is larger) with an index, as on the Hugging Face hub:
    model-00001-of-0000N.safetensors and model.safetensors.index.json instead of
    model.safetensors."""
    sample_prompts: base.MayChange[Annotated[tuple[str, ...], Field(strict=False)]] = ()
    """Prompts that the model continues at each checkpoint, in the background: greedily and, with
    seed, at temperature 1. The texts are in samples.jsonl. A model that is trained on chats answers
    them."""
    sample_tokens: base.MayChange[base.Size] = 64
    """Maximum number of tokens to add to each of the sample_prompts."""
    trackers: base.MayChange[Annotated[tuple[str, ...], Field(strict=False)]] = ()
    """Experiment trackers that the run is sent to in the background: wandb, tensorboard, trackio,
    mlflow, each with the extra of its name (`uv sync --extra wandb`), or one of another package."""
    chart_style: base.MayChange[ChartStyle] = "plain"
    """Style of the charts."""
    lineage: base.MayChange[Lineage | None] = None
    """The run that `train.py --like` copied, or the preset, and the keys that it changed. Written
    by train.py."""

    @check
    def _microbatch_divides(self) -> Iterator[str]:
        data = self.sharding.sizes[0] if self.sharding else -1
        if data != -1 and (line := indivisible_microbatch(self, data)):
            yield line

    @check
    def _lora_fits(self) -> Iterator[str]:
        if self.lora and self.start_from is None:
            yield 'lora: needs start_from, the weights to adapt, for example "imported"'
        if self.lora and self.optimizer == "muon":
            yield 'optimizer: "muon" is for kernels, but lora trains none; use "adamw"'

    @property
    def branch_step(self) -> int:
        """The step of another run that this one continues, with --from-step; -1 if it doesn't."""
        step = self.lineage.from_step if self.lineage else None
        return -1 if step is None else step

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one update."""
        raise NotImplementedError

    @property
    def averaging_decay(self) -> float | None:
        """Decay of the average of the weights; None for no average."""
        return None

    @property
    def sequences_per_example(self) -> int:
        """Consecutive sequences that belong together, on one device: 2 for a pair of answers."""
        return 1

    @property
    def uses_float8(self) -> bool:
        """Whether matmuls of the blocks are in FP8."""
        return False

    @property
    def microbatches_per_step(self) -> int:
        """Microbatches in one update; in the largest one if they grow."""
        return self.sequences_per_step // self.microbatch_size

    def sequences_before(self, step: int) -> int:
        """Return the number of sequences in all updates before `step`."""
        return step * self.sequences_per_step

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of steps in which the learning rate rises."""
        steps = (self.lineage and self.lineage.warmup_of) or total_steps
        return min(round(steps * self.warmup_period_percent / 100), total_steps - 1)

    def steps_of(self, sequences: int) -> int:
        """Return the number of updates needed for this many sequences."""
        most = range(sequences // self.sequences_per_step + 1)
        return bisect.bisect_right(most, sequences, key=self.sequences_before) - 1


def indivisible_microbatch(optimization: OptimizationConfig, data: int) -> str | None:
    """Return why microbatch_size does not fit this many devices along the data axis, or None."""
    size, per_example = optimization.microbatch_size, optimization.sequences_per_example
    key = "microbatch_size" if per_example == 1 else f"microbatch_size ÷ {per_example}"
    return indivisible(key, size // per_example, data, "data")

"""`reinforce.json`: how a model is trained by reinforcement learning from verifiable rewards; its
tasks, each with a source of items, a verifier, and the settings of the built-in tasks, which assume
one token per character."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from rungs.common import errors, paths, strict_json
from rungs.common.strict_json import StrictModel, check
from rungs.config.base import Bytes, MayChange, NotNegative, Positive, Size
from rungs.config.optimization_config import BelowOne, OptimizationConfig, Schedule
from rungs.config.option_values import LEAST_SCALE, MOST_SCALE

Bits = Annotated[int, Field(ge=1, le=1000)]
Digits = Annotated[int, Field(ge=1, le=100)]
BuiltInVerifier = Literal[
    "exact", "last_number", "gsm8k", "countdown", "sorted", "brackets", "parity", "math"
]
VERIFIERS: tuple[str, ...] = get_args(BuiltInVerifier)
TOOLS = ("calculator", "python")
REASONING_GYM = "reasoning-gym:"
"""Prefix of sources from the library reasoning-gym."""
LIBRARIES = ("verifiers", "openenv")
"""Libraries of environments, and the prefixes of sources from them."""
ITEM_FILE_ENDING, VERIFIER_FILE_ENDING = ".jsonl", ".py"
TRUST_FLAG = "--trust-verifier"
Advantage = Literal["mean", "mean_std", "leave_one_out", "none"]
PolicyLoss = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo"]
Aggregation = Literal["constant", "tokens", "sequences"]
Credit = Literal["completion", "turn"]
_AGGREGATIONS: dict[PolicyLoss, Aggregation] = {
    "grpo": "sequences",
    "dr_grpo": "constant",
    "dapo": "tokens",
    "cispo": "tokens",
    "gspo": "sequences",
}
_CLIP_HIGH: dict[PolicyLoss, float] = {
    "grpo": 0.2,
    "dr_grpo": 0.2,
    "dapo": 0.28,
    "cispo": 0.28,
    "gspo": 4e-4,
}


class RangeSettings(StrictModel):
    """Settings with pairs of keys `min_…` and `max_…`."""

    @check
    def _least_is_not_above_most(self) -> Iterator[str]:
        values = dict(self)
        for key, least in values.items():
            most_key = key.replace("min_", "max_", 1)
            if key.startswith("min_") and least > values[most_key]:
                yield f"{key}: {least} is more than {most_key} {values[most_key]}"


class ParitySettings(RangeSettings):
    """`parity`: is the number of ones odd? `0110:` → `=0`, worked `0010=0` (running parities)."""

    min_bits: Bits = 4
    """Bits of the shortest prompt."""
    max_bits: Bits = 16
    """Bits of the longest prompt."""


class CountdownSettings(StrictModel):
    """`countdown`: make an expression of the numbers that equals the target. `3,7,2=19:` → `3*7-2`.
    Each number may be used once."""

    numbers: Annotated[int, Field(ge=2, le=6)] = 3
    """How many numbers there are."""
    largest: Annotated[int, Field(ge=1, le=1000)] = 9
    """The largest of the numbers; the smallest is 1."""
    largest_target: Annotated[int, Field(ge=1, le=100_000)] = 99
    """The largest target; the smallest is 1."""
    use_all: bool = False
    """Whether every number must be used, once each."""


class SortSettings(RangeSettings):
    """`sort`: digits in ascending order. `302:` → `=023`, worked `032,23,3=023` (selection sort:
    before each comma the smallest digit of the rest, followed by the others)."""

    min_digits: Digits = 6
    """Digits of the shortest prompt."""
    max_digits: Digits = 10
    """Digits of the longest prompt."""


class BracketsSettings(RangeSettings):
    """`brackets`: close what is open. `([]{:` → `=})`, worked `({=})` (what is open, then the
    answer). Other endings that balance count as well."""

    min_length: Annotated[int, Field(ge=1, le=1000)] = 4
    """Brackets in the shortest prompt."""
    max_length: Annotated[int, Field(ge=1, le=1000)] = 16
    """Brackets in the longest prompt."""
    kinds: Annotated[int, Field(ge=1, le=4)] = 3
    """How many of the kinds (), [], {}, <> there are."""


class AddSettings(RangeSettings):
    """`add`: the sum of two numbers. `57+68:` → `=125`, worked `7+8+0>15,5+6+1>12=125` (columns
    from the right: both digits and the carry, then their sum)."""

    min_digits: Digits = 3
    """Digits of the shortest number."""
    max_digits: Digits = 4
    """Digits of the longest number."""


class SumsSettings(StrictModel):
    """`sums`: a sum of two digits, which a small model can learn, or a product, which it can't.
    `3+4:` → `=7`, `738*952:` → `=702576`; worked with a call of the calculator."""

    products_percent: Annotated[int, Field(ge=0, le=100)] = 90
    """Percentage of products."""
    digits: Annotated[int, Field(ge=1, le=100)] = 3
    """Digits of a product's factors."""


class GuessSettings(StrictModel):
    """`guess`: a number from 1 to `largest`, for an environment that answers guesses. The prompt is
    the number of the game, `4711:`; worked are random guesses that fit the replies,
    `37?>50?<41?`."""

    largest: Annotated[int, Field(ge=2, le=1_000_000)] = 64
    """The largest number."""


SETTINGS: dict[str, type[StrictModel]] = {
    "parity": ParitySettings,
    "countdown": CountdownSettings,
    "sort": SortSettings,
    "brackets": BracketsSettings,
    "add": AddSettings,
    "sums": SumsSettings,
    "guess": GuessSettings,
}
"""The built-in tasks, each with the keys of its `settings`."""


class TaskConfig(StrictModel):
    """A task: items with a prompt and an answer, and the verifier that rewards completions."""

    source: str
    """Where items come from. A built-in task: parity, countdown, sort, brackets, add, sums or
    guess. A file of JSON lines with the keys prompt, answer, info and verifier, such as
    "items.jsonl"; relative paths start at the run folder. "reasoning-gym:NAME", a task of this
    library (the extra `reasoning`). Or an environment of a library, with items, replies and
    rewards: "verifiers:TASKSET" or "openenv:module:Class" (the extras `verifiers`, `openenv`)."""
    settings: dict[str, Any] = Field(default={})
    """Settings of the source, such as `{"max_bits": 20}` for parity. Files have none. For verifiers
    they are the taskset's config, for openenv the arguments of the class."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of generated items. The run's own seed doesn't matter to them, so runs with different
    seeds have the same items."""
    train_items: Size | None = None
    """Use only this many training items. null: all of a file; of a source that generates items, a
    new one each time. verifiers and openenv, whose items may be without end, need it."""
    validation_items: Size = 256
    """How many items are held out. None of their prompts is among the training items, except for
    verifiers and openenv: there these are the first items, and prompts may be all the same."""
    validation_source: str | None = None
    """For a file: another one with the held-out items, of which the first `validation_items` are
    used. null: this many are taken out of `source`, chosen by a hash of their prompts."""
    verifier: str | None = None
    """What rewards completions: exact, last_number, gsm8k, countdown, sorted, brackets, parity,
    math (expressions in LaTeX; the extra `math`), or a Python file in the run folder, such as
    "reward.py", with a function `reward(prompt, completion, answer, info)`; it runs only with
    --trust-verifier. null: the source's own."""
    environment: str | None = None
    """Instead of a verifier, a Python file in the run folder, such as "environment.py", with a
    class `Environment` that answers each turn of the model and rewards it; it runs only with
    --trust-verifier. null: that of the source, if it is verifiers or openenv."""
    tools: list[str] = Field(default=[])
    """What the model may call before its answer, which the verifier rewards: calculator, python
    (runs the model's code), or Python files in the run folder, such as "tools.py". All but the
    calculator run only with --trust-verifier."""
    turn_end: Annotated[str, Field(min_length=1)] | None = None
    """Text with which the model ends a turn besides the end-of-text token, such as "?". For models
    without a chat template and tasks with an environment."""
    max_turns: Size = 8
    """Turns of the model in a completion, with an environment or tools."""
    max_reply_tokens: Size = 64
    """Tokens of a reply, without those of the chat template; longer ones are cut, with a
    warning."""
    verifier_timeout_seconds: Positive = 10.0
    """How long a verifier in another process (a Python file, math, reasoning-gym) may take for one
    completion, an environment for one turn, and a tool for one call."""
    verifier_memory_bytes: Bytes = 2 * 2**30
    """How much address space each process of such a verifier, environment or tool may have."""

    @check
    def _source_is_known(self) -> Iterator[str]:
        if self.library:
            if self.train_items is None:
                yield f"train_items: give a number, which {self.library} needs"
        elif not (self.is_file or self.reasoning_gym_name or self.source in SETTINGS):
            names = ", ".join((*SETTINGS, *(f"{name}:NAME" for name in LIBRARIES)))
            known = f"use {names}, a file *{ITEM_FILE_ENDING} or {REASONING_GYM}NAME"
            advice = errors.did_you_mean(self.source, SETTINGS, known)
            yield f'source: "{self.source}" is unknown; {advice}'

    @check
    def _settings_fit(self) -> Iterator[str]:
        if self.is_file and self.settings:
            yield "settings: files of items have none; remove them"
        known = SETTINGS.get(self.source)  # reasoning-gym checks its own when the task is opened
        if known and (lines := strict_json.value_problems(self.settings, known)):
            yield f"settings of {self.source}: {'; '.join(lines)}"

    @check
    def _only_files_split(self) -> Iterator[str]:
        held_out = self.validation_source
        if held_out is not None and not self.is_file:
            yield f"validation_source: {self.source} generates its own held-out items; remove it"
        elif held_out is not None and not held_out.endswith(ITEM_FILE_ENDING):
            yield f'validation_source: "{held_out}" is no file *{ITEM_FILE_ENDING}'

    @check
    def _verifier_is_known(self) -> Iterator[str]:
        if self.verifier is None or self.verifier in VERIFIERS:
            return
        if not self.verifier.endswith(VERIFIER_FILE_ENDING):
            known = f"use {', '.join(VERIFIERS)} or a file *{VERIFIER_FILE_ENDING}"
            advice = errors.did_you_mean(self.verifier, VERIFIERS, known)
            yield f'verifier: "{self.verifier}" is unknown; {advice}'
        elif not paths.is_inside(self.verifier):
            yield f'verifier: "{self.verifier}" is not in the run folder'

    @check
    def _own_code_is_in_the_run_folder(self) -> Iterator[str]:
        own = {name: "tools" for name in self.tools if name not in TOOLS}
        if self.environment is not None:
            own[self.environment] = "environment"
        for name, key in own.items():
            if not (name.endswith(VERIFIER_FILE_ENDING) and paths.is_inside(name)):
                known = f"{', '.join(TOOLS)} or " if key == "tools" else ""
                file = f"a file *{VERIFIER_FILE_ENDING} in the run folder"
                yield f'{key}: "{name}" is not {known}{file}'

    @check
    def _turns_fit(self) -> Iterator[str]:
        if self.environment and (self.verifier or self.tools):
            yield "environment: rewards and replies itself; remove verifier and tools, or it"
        if self.library and (self.environment or self.verifier or self.tools):
            yield f"source: {self.source} has its own environment, without verifier and tools"
        if self.turn_end is not None and not (self.environment or self.library):
            yield "turn_end: is for a task with an environment; remove it"

    @property
    def has_turns(self) -> bool:
        """Whether a completion may have several turns."""
        return bool(self.environment or self.tools or self.library)

    @property
    def needs_trust(self) -> bool:
        """Whether the task runs code that only TRUST_FLAG allows."""
        is_own = (self.verifier or "").endswith(VERIFIER_FILE_ENDING)
        return bool(is_own or self.environment or self.library or {*self.tools} - {"calculator"})

    @property
    def library(self) -> str | None:
        """The library whose environment the source is, None for others."""
        library, _, name = self.source.partition(":")
        return library if library in LIBRARIES and name else None

    @property
    def is_file(self) -> bool:
        """Whether the items come from a file of JSON lines."""
        return self.source.endswith(ITEM_FILE_ENDING)

    @property
    def files(self) -> list[str]:
        """The files that the task names; relative paths start at the run folder."""
        own = (self.verifier, self.environment, *self.tools)
        names = (self.source, self.validation_source, *own)
        endings = (ITEM_FILE_ENDING, VERIFIER_FILE_ENDING)
        return [name for name in names if name and name.endswith(endings)]

    @property
    def reasoning_gym_name(self) -> str | None:
        """Name of the task in reasoning-gym, None for other sources."""
        name = self.source.removeprefix(REASONING_GYM)
        return name if name != self.source else None


class ReinforceConfig(OptimizationConfig):
    """How a model is trained by reinforcement learning."""

    SAMPLES: ClassVar[bool] = True

    start_from: str
    """The weights to start from: "imported" (the model that `pretrained.py import` wrote to this
    run folder), or the path of a run folder, a checkpoint or a model.safetensors. They must come
    with a tokenizer."""
    tasks: Annotated[list[TaskConfig], Field(min_length=1)]
    """The tasks to learn. With several, prompts come from them in turn."""
    steps: Size
    """Steps of the run. Each samples texts, rewards them and updates the model."""
    max_new_tokens: Size
    """Maximum number of tokens of a completion, with the end-of-text token, and the replies of an
    environment or of tools. A prompt may have sequence_length − max_new_tokens."""
    prompts_per_step: Size = 16
    """Prompts in a step."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=2**31 - 1)] = 8
    """Completions of each prompt: a group, in which rewards are compared."""
    temperature: Annotated[float, Field(ge=LEAST_SCALE, le=MOST_SCALE)] = 1.0
    """Sampling divides the logits by this, and so does training."""
    advantage: Advantage = "mean"
    """How much better a completion is than its group. mean: reward − mean. leave_one_out: reward −
    mean of the others (RLOO, Ahmadian et al. 2024; Kool et al. 2019), which is unbiased. mean_std:
    (reward − mean) ÷ standard deviation (Shao et al. 2024), which weights easy and hard prompts
    more than those in between. none: rewards are measured only, which needs a teacher."""
    credit: Credit = "completion"
    """What a token is credited with, with an environment or tools. completion: all rewards of its
    completion. turn: those of its own turn and later ones, as earlier ones don't depend on it; they
    are compared with those of the same turn in the other completions of the group that have it."""
    teacher: str | None = None
    """On-policy distillation: a run, a checkpoint, or a weights file with the same tokenizer. Each
    sampled token is paid its log-probability under the teacher − that when it was sampled, besides
    the advantage: its part of the reverse KL divergence (Agarwal et al. 2023; Gu et al. 2023).
    null: no teacher."""
    teacher_coefficient: Positive = 1.0
    """Factor on what the teacher pays."""
    loss: PolicyLoss = "dr_grpo"
    """They differ in later updates from the same texts (updates_per_rollout), where ρ is the
    probability of a token now ÷ when it was sampled, and in their default aggregation. grpo (Shao
    et al. 2024), dr_grpo (Liu et al. 2025) and dapo (Yu et al. 2025): tokens whose ρ has left the
    clipping range, in the direction in which their advantage pushes, have no gradient. cispo
    (MiniMax 2025): ρ is limited, but every token keeps its gradient. gspo (Zheng et al. 2025): ρ is
    that of the completion, the geometric mean of its tokens' ρ, which are clipped together."""
    aggregation: Aggregation | None = None
    """Divisor of a step's sum over tokens. constant: completions × max_new_tokens, which is
    unbiased. tokens: the step's sampled tokens. sequences: completions × tokens of the completion,
    which favours short right and long wrong completions. null: constant for dr_grpo, sequences for
    grpo and gspo, tokens for dapo and cispo."""
    clip_low: BelowOne = 0.2
    """ρ below 1 − this is clipped; cispo has no lower limit. gspo needs its own, such as 0.0003, as
    the ρ of a completion stays close to 1."""
    clip_high: Positive | None = None
    """ρ above 1 + this is clipped. null: 0.28 for dapo and cispo, 0.2 for grpo and dr_grpo, 0.0004
    for gspo."""
    updates_per_rollout: Size = 1
    """Updates from the same texts."""
    staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """1: sample the texts of the next step while the model is updated from those of this one. They
    come from the weights before this update, so that ρ is not 1 in the first update either, and
    `loss` clips it. Needs one device. 0: sample with the newest weights."""
    max_sampler_ratio: Positive | None = None
    """Truncated importance sampling (Yao et al. 2025): weight each token by its probability in
    training ÷ in sampling, which differ in rounding, but at most by this. null: off."""
    kl_coefficient: NotNegative = 0.0
    """Weight of the KL divergence from the reference in the objective, per token. Its gradient
    equals the gradient of ½ (log-probability − the reference's)²."""
    reference: str | None = None
    """Weights of the reference for the KL divergence, as in start_from. null: start_from itself."""
    mask_truncated: bool = False
    """Whether to leave completions that reached max_new_tokens or max_turns out of the loss and of
    the means of their groups."""
    validation_samples: MayChange[Size] = 8
    """Completions of each held-out item in a validation, for pass@1 and for pass@k up to this k."""
    sampling_batch_size: MayChange[Size | None] = None
    """Completions to sample at once, rounded up to a multiple of the devices; fewer take less
    memory. Absent: all completions of a step."""
    schedule: Schedule = "constant"
    """How the learning rate falls to min_learning_rate_percent after the warm-up, as in
    `train.json`."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay: each update subtracts learning rate × this × the weight."""
    clipping_max_norm: Positive | None = 1.0
    """The largest global norm of an update's gradient. A larger gradient is scaled down to it.
    null: off."""

    @check
    def _microbatches_fill_step(self) -> Iterator[str]:
        if self.sequences_per_step % self.microbatch_size:
            yield (
                f"microbatch_size: {self.microbatch_size} does not divide the"
                f" {self.sequences_per_step} completions of a step (prompts_per_step ×"
                " samples_per_prompt)"
            )

    @check
    def _has_clip_low(self) -> Iterator[str]:
        is_clipping = self.updates_per_rollout > 1 or self.staleness
        if self.loss == "gspo" and is_clipping and "clip_low" not in self.model_fields_set:
            yield 'clip_low: needed by loss "gspo"; Zheng et al. 2025 use 0.0003'

    @check
    def _something_is_paid(self) -> Iterator[str]:
        if self.advantage == "none" and self.teacher is None:
            yield 'advantage: "none" needs a teacher'

    @check
    def _turns_are_credited(self) -> Iterator[str]:
        if self.credit == "turn" and not any(task.has_turns for task in self.tasks):
            yield 'credit: "turn" needs a task with an environment or tools'

    @check
    def _reference_is_used(self) -> Iterator[str]:
        if self.reference is not None and not self.kl_coefficient:
            yield "reference: needs a kl_coefficient above 0; without one, remove it"

    @property
    def sequences_per_step(self) -> int:
        """Completions in one step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def total_updates(self) -> int:
        """Updates in the whole run."""
        return self.steps * self.updates_per_rollout

    @property
    def step_aggregation(self) -> Aggregation:
        """`aggregation`, or the loss's default."""
        return self.aggregation or _AGGREGATIONS[self.loss]

    @property
    def highest_ratio(self) -> float:
        """The ratio above which tokens are clipped."""
        return 1 + (self.clip_high or _CLIP_HIGH[self.loss])

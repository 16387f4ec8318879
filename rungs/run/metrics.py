"""`metrics.jsonl`: one line per global step, exactly once, also after a crash: `StepMetrics` in
training, `PolicyMetrics` in reinforcement learning."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self

from pydantic import Field, GetPydanticSchema, TypeAdapter
from pydantic_core import core_schema
from typing_extensions import TypeVar

from rungs.common import disk
from rungs.common.run_log import log

METRICS_FILE = "metrics.jsonl"

Spike = Literal["seen", "skipped"]


Count = Annotated[int, Field(ge=0, le=2**62)]
Figure = Annotated[
    float, GetPydanticSchema(lambda kind, schema: core_schema.nullable_schema(schema(kind)))
]
"""A number, or null for one that was not finite."""


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """The metrics that every global step has. Non-finite numbers are written as null."""

    VARYING: ClassVar[frozenset[str]] = frozenset({"step_seconds", "tokens_per_second", "resumed"})
    """Fields that differ between starts of the same run."""

    global_step: Count
    """Counted from 0."""
    tokens_seen: Count
    """Training tokens up to and including this step."""
    train_loss: float | None
    """The minimized loss over the step's finite microbatches; in training the mean cross-entropy in
    nats per counted target."""
    learning_rate: float | None
    gradient_norm: float | None
    """Global norm of the accumulated gradient, before clipping."""
    clipped: bool
    dropped_microbatches: Count
    """Microbatches left out because their loss or gradient was not finite."""
    step_seconds: Figure
    """Time between the ends of the previous step and this one, stalls included."""
    tokens_per_second: Figure
    loss_scale: Figure | None = None
    """float16: the factor on the loss. A microbatch whose gradients overflow with it is left out
    but not counted as dropped; the next step uses half of it."""
    resumed: bool | None = None
    """Whether training was resumed at this step."""

    @property
    def reproducible(self) -> dict[str, Any]:
        """Fields that are bit-equal whether or not the run is stopped and resumed."""
        return {key: value for key, value in vars(self).items() if key not in self.VARYING}

    def as_line(self) -> str:
        """Return the step's line in the file, without absent optional fields."""
        values = {key: _finite(value) for key, value in dataclasses.asdict(self).items()}
        for field in dataclasses.fields(self):
            if field.default is None and values[field.name] is None:
                del values[field.name]
        return json.dumps(values) + "\n"


@dataclasses.dataclass(frozen=True)
class PreferenceFigures:
    """What a model makes of preferences, as means over pairs of answers or, with kto, over the
    answers that are desirable (chosen) and those that are not (rejected)."""

    margin: float | None = None
    """dpo and ipo: beta × how much more the log-probability of the chosen answer rose above the
    reference's than that of the rejected one; simpo: beta × the difference of their means per
    token."""
    accuracy: float | None = None
    """Share of pairs with a positive margin. kto: of answers whose log-probability rose by more
    than `kl` if they are desirable, and by less if not."""
    chosen_log_prob: float | None = None
    """Log-probability of the chosen answer, in nats."""
    rejected_log_prob: float | None = None
    kl: float | None = None
    """KL divergence of the model from the reference in nats per answer, E[log reference − log
    model] over both answers, as if the reference had sampled them; None without a reference. kto:
    its own estimate, E[log model − log reference] over answers to other prompts, at least 0."""


@dataclasses.dataclass(frozen=True)
class StepMetrics(StepRecord):
    """The metrics of one global step of training."""

    validation_loss: float | None = None
    """Mean cross-entropy on the validation tokens, for steps with a validation."""
    ema_validation_loss: float | None = None
    """With `ema_decay`: that of the averaged weights."""
    bits_per_byte: float | None = None
    """Validation loss in bits per byte of text, comparable between tokenizers; None if the dataset
    has no tokenizer."""
    validation_losses: dict[str, float] | None = None
    """Validation loss on each dataset of a mixture with a validation split, and on each of
    `validation_datasets`."""
    dataset_tokens: dict[str, Count] | None = None
    """With a mixture whose weights change: training tokens of each dataset up to and including this
    step."""
    load_balancing_loss: float | None = None
    """Mixture of experts: mean over layers. 1 if all experts get the same number of tokens."""
    expert_tokens: list[list[Count]] | None = None
    """Mixture of experts: tokens that were routed to each expert of each layer that has some."""
    spike: Spike | None = None
    """A loss far above the recent ones (`failed_steps.py`): whether the update was skipped."""
    layer_warning: str | None = None
    """With `watch_interval`: what is wrong in a layer, with advice."""
    validation_data: str | None = None
    """Data behind `validation_loss`: number of tokens, first token, sha256 of files."""
    preferences: PreferenceFigures | None = None
    """Of the step's pairs before the update, if the run learns from preferences."""
    validation_preferences: PreferenceFigures | None = None
    """Likewise of the held-out pairs, for steps with a validation."""


@dataclasses.dataclass(frozen=True)
class Validation:
    """Performance on the held-out items, sampling at the temperature of training."""

    items: Count
    samples: Count
    """Completions per item."""
    pass_at: dict[int, float]
    """For each k, the probability that at least one of k completions is correct: mean over items of
    an unbiased estimate (Chen et al. 2021)."""
    pass_at_1_interval: tuple[float, float]
    """95% confidence interval of pass@1."""
    reward: float
    mean_tokens: float
    """Mean tokens of a completion."""
    truncated: float
    """Share of completions that reached max_new_tokens."""

    @property
    def pass_at_1(self) -> float:
        """Share of correct completions."""
        return self.pass_at[1]

    @property
    def pass_at_1_text(self) -> str:
        """pass@1 with its interval."""
        low, high = self.pass_at_1_interval
        return f"{self.pass_at_1:.1%} ({low:.1%} to {high:.1%})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyMetrics(StepRecord):
    """The metrics of one global step of reinforcement learning. `tokens_seen` and
    `tokens_per_second` count sampled tokens; gradient norm and learning rate are those of the
    step's last update."""

    VARYING: ClassVar[frozenset[str]] = StepRecord.VARYING | frozenset(
        f"{part}_seconds" for part in ("sampling", "verifying", "updating")
    )

    reward: Figure
    """Mean over the completions that have one."""
    rewards: dict[str, float]
    """The parts of the reward, likewise."""
    correct: Figure
    """Share of the completions with a reward that are correct."""
    failed_verdicts: Count
    """Completions without a reward, as the verifier failed. They are left out of the update."""
    mean_tokens: Figure
    """Tokens that the model wrote in a completion."""
    truncated: Figure
    """Share of completions that reached max_new_tokens or max_turns."""
    groups_wrong: Count
    """Prompts with only wrong completions."""
    groups_mixed: Count
    """Prompts with right and wrong completions."""
    groups_right: Count
    """Prompts with only right completions."""
    equal_groups: Count
    """Prompts whose completions all have the same reward, and so no advantages."""
    entropy: Figure
    """Mean entropy of the sampling distributions, in nats."""
    log_prob_gap: Figure
    """Mean absolute difference of log-probabilities between sampling and training, in nats."""
    largest_log_prob_gap: Figure
    exact_ratios: Figure
    """Share of tokens with bit-equal log-probabilities in sampling and training."""
    sampler_kl: Figure
    """KL divergence of the trained from the sampling distribution, in nats per token, by the
    estimator k3 (Schulman 2020)."""
    kl: Figure | None = None
    """Likewise from the reference, with a kl_coefficient."""
    teacher_kl: Figure | None = None
    """Likewise from the teacher."""
    clipped_ratios: Figure | None = None
    """With several updates per rollout: share of tokens clipped in the last one."""
    sampling_seconds: Figure
    verifying_seconds: Figure
    updating_seconds: Figure
    mean_turns: Figure = 1.0
    """Turns of a completion."""
    validation: Validation | None = None
    """Validation after the step, if due."""
    start_validation: Validation | None = None
    """In step 0: validation of the weights that the run starts from."""


R = TypeVar("R", bound=StepRecord, default=StepMetrics)


def read(path: Path) -> list[StepMetrics]:
    """Return the training steps recorded in the file; see `stream`."""
    return list(stream(path, StepMetrics))


def stream(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield the steps recorded in the file, in order, as a list of a million would take a gigabyte.
    Damaged lines, and unknown fields of other versions, are skipped."""
    if not path.is_file():
        return
    validator = TypeAdapter(kind).validator
    with path.open("rb") as lines:
        for line in lines:
            try:
                step = validator.validate_json(line)
            except ValueError:
                continue
            yield step


class MetricsLog(Generic[R]):
    """The file, opened for appending, with steps after `last_step` removed. `on_step` is called
    with each added step."""

    def __init__(
        self,
        path: Path,
        last_step: int,
        kind: type[R],
        on_step: Callable[[StepRecord], None] = lambda _: None,
    ) -> None:
        self._kind, self._on_step = kind, on_step
        kept = [step for step in stream(path, kind) if step.global_step <= last_step]
        if (missing := last_step + 1 - len(kept)) > 0:
            log.warning("%s: the metrics of %d earlier steps are missing", path, missing)
        self._path = path
        self._begin(kept)

    def append(self, step: R) -> None:
        """Add a step. The line then survives the end of the process. Raises RunFailure."""
        line = step.as_line().encode()
        with disk.writing(self._path, f"the metrics of step {step.global_step}", len(line)):
            self._add(line)
        self._on_step(step)

    def replace_last(self, step: R) -> None:
        """Replace the last step; raises RunFailure."""
        self._file.close()
        self._begin([*list(stream(self._path, self._kind))[:-1], step])

    def sync(self) -> None:
        """Wait until all lines so far are durably on disk; raises RunFailure."""
        with disk.writing(self._path, "the metrics so far", self._bytes):
            disk.flush(self._file)

    def _begin(self, steps: list[R]) -> None:
        """Rewrite the file atomically with exactly these steps, then open it for appending."""
        content = "".join(step.as_line() for step in steps).encode()
        with disk.writing(self._path, "the metrics so far", len(content)):
            disk.replace_file(self._path, content)
            self._file = self._path.open("ab", buffering=0)
        self._bytes = len(content)

    def _add(self, line: bytes) -> None:
        """Append a line completely or not at all."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._bytes)
            raise
        self._bytes += len(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with disk.writing(self._path, "the metrics so far"):  # some systems only write now
            self._file.close()


class NullMetricsLog(MetricsLog[R]):
    """Writes nothing, as the first process writes the metrics for all."""

    def __init__(self) -> None: ...

    def append(self, step: R) -> None: ...

    def replace_last(self, step: R) -> None: ...

    def sync(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

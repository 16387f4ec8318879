"""Reinforcement learning as a kind of run: sample, verify, update, validate.
`rungs/training/start.py` starts it and `rungs/training/trainer.py` has the loop."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing import checkpoint_folder, load, manifest, published, weights_file
from rungs.checkpointing.load import Start
from rungs.common.errors import RunFailure, UserError, errors_at
from rungs.common.paths import file_checksum
from rungs.common.run_log import log
from rungs.common.shown_text import counted
from rungs.common.signals import Interrupted
from rungs.common.strict_json import format_value, json_checksum
from rungs.config.reinforce_config import TaskConfig
from rungs.config.run_config import REINFORCE_FILE, ReinforceRunConfig
from rungs.data.provenance import Provenance
from rungs.data.text import tokenizer_files
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.tokens import dataset
from rungs.model.rollouts import RolloutSampler
from rungs.objectives.distillation import find_teacher, place_teacher
from rungs.objectives.policy import PolicyObjective
from rungs.optim.precision import dtype_of
from rungs.parallel.processes import check_all_agree, is_first_process, run_on_first
from rungs.reinforcement import policy_update
from rungs.reinforcement.rollout_files import Completion, RolloutFiles, read, write_samples
from rungs.reinforcement.sampling import CompletionSource, Prompts, Seconds, longest_prompt
from rungs.reinforcement.turn_format import TurnFormat
from rungs.run import folder, metrics
from rungs.run.metrics import PolicyMetrics, Validation
from rungs.run.step_table import StepTable
from rungs.step.train_step import StepResult, make_step
from rungs.tasks.catalog import open_task
from rungs.tasks.checkup import Checkup, check
from rungs.tasks.environment import Environment
from rungs.tasks.task import Task
from rungs.training import run_report
from rungs.training.learner import NEVER, Kind, Replayed, Stops, record_fields
from rungs.training.start import model_and_optimizer

_MANY_WRONG_STEPS = 5


@dataclasses.dataclass(frozen=True)
class PolicyInputs:
    """Tokenizer, tasks and environments of a run, opened and checked. See `learner.Inputs`."""

    config: ReinforceRunConfig
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    tasks: list[Task]
    environments: list[Environment]
    formats: list[TurnFormat]
    checkups: list[Checkup | None]
    reference: weights_file.Weights | None
    """Weights of the reference for the KL divergence."""
    teacher: weights_file.Weights | None
    longest_prompt: int
    """Tokens of the longest prompt seen in the tasks."""
    record: Provenance

    metrics: ClassVar = PolicyMetrics
    datasets_dir: ClassVar = None
    benchmarks: ClassVar = None

    @property
    def total_steps(self) -> int:
        return self.config.train.steps

    def edit_to_extend(self, done: int) -> str:  # noqa: ARG002
        return f"set more steps in {REINFORCE_FILE}"

    def learner(self, start: Start, mesh: Mesh, _: Sequence[PolicyMetrics]) -> "PolicyLearner":
        return PolicyLearner(self, start, mesh)

    def resources(self, _: Start, __: Mesh) -> AbstractContextManager[None]:
        return nullcontext()


def reinforcement(trust_verifier: bool) -> Kind:
    """Return reinforcement learning as a kind of run. `trust_verifier` allows running a Python file
    that a task names."""

    def replayed(start: Start, mesh: Mesh) -> Replayed:
        train, length = start.config.train, start.config.sequence_length
        is_exact = train.updates_per_rollout == 1 and not train.staleness
        objective = PolicyObjective(train, is_exact, length)
        return Replayed(objective, make_step(objective, train, mesh), policy_update.ARRAY_NAMES)

    return Kind(functools.partial(_open, trust_verifier=trust_verifier), replayed)


def _open(start: Start, stack: ExitStack, trust_verifier: bool) -> PolicyInputs:
    """Open and check everything that completions depend on. Raises UserError if something is
    missing or changed, or a verifier fails or can be tricked."""
    run, config, weights = start.run, start.config, start.weights
    assert weights is not None  # start_from is required
    file = weights.tokenizer_file
    if file is None:
        raise UserError(
            f"{run.path / REINFORCE_FILE}: start_from: {weights.path} has no tokenizer.json beside"
            " it, which prompts need; start from a checkpoint that has one"
        )
    tokenizer = tokenizer_files.load_tokenizer(file)
    ends = published.all_stop_tokens(weights, tokenizer)
    if not ends:
        raise UserError(f"{file}: has no end-of-text token, with which a completion ends")
    tasks = [open_task(task, run.path, trusts=trust_verifier) for task in config.train.tasks]
    environments, formats = list[Environment](), list[TurnFormat]()
    for task_config, task in zip(config.train.tasks, tasks, strict=True):
        opened = Environment(task_config, task, run.path, trusts=trust_verifier)
        environments.append(stack.enter_context(opened))
        template = published.find_chat_template(weights.path) if task_config.has_turns else None
        formats.append(TurnFormat(task_config, tokenizer, template, ends, opened.tools))
    longest = Prompts(tasks, config.train, formats, longest_prompt(config)).longest()
    checkups: list[Checkup | None] = []
    run_on_first(lambda: checkups.extend(map(_checked, environments, tasks)))
    reference, teacher = _reference(start), _teacher(start, tokenizer)
    beside = {"reference": reference, "teacher": teacher}
    checksums = record_of(config.train.tasks, tasks, environments, beside)
    record = Provenance(checksums, weights.header.tokenizer, file)
    check_all_agree("configs and tasks", f"{config} {record[:2]}")
    if start.saved is not None:
        check_same_tasks(start.saved.meta.datasets, checksums)
    parts = tokenizer, ends, tasks, environments, formats, checkups
    return PolicyInputs(config, *parts, reference, teacher, longest, record)


def _checked(environment: Environment, task: Task) -> Checkup | None:
    """Return the findings about a verifier; None for an environment with rewards of its own."""
    return check(environment.verifier, task) if environment.verifier else None


def _reference(start: Start) -> weights_file.Weights | None:
    """Return the weights of the reference for the KL divergence, None without one."""
    train = start.config.train
    if not train.kl_coefficient:
        return None
    if train.reference is None:
        return load.find_starting_weights(start.run, start.config)
    return load.MergedWeights(checkpoint_folder.find_valid_weights(train.reference))


def _teacher(start: Start, tokenizer: Tokenizer) -> weights_file.Weights | None:
    """Return the weights of the teacher, None without one. Raises UserError if its tokens are not
    those of the run."""
    name = start.config.train.teacher
    if name is None:
        return None
    with errors_at(f"{start.run.path / REINFORCE_FILE}: teacher: "):
        weights = find_teacher(name, start.config)
        file = weights.tokenizer_file
        if not file or tokenizer_files.load_tokenizer(file).definition != tokenizer.definition:
            raise UserError(f"{weights.path} doesn't come with the tokenizer of start_from")
    return weights


class Sampled(NamedTuple):
    """Results of a step."""

    updated: policy_update.Updated
    seconds: Seconds
    start_validation: Validation | None

    @property
    def completions(self) -> list[Completion]:
        return self.updated.completions


class PolicyLearner:
    """Takes the steps of a run on completions of its own model. See `learner.Learner`."""

    reads_late = False
    failure = None
    peak_tokens_per_second = None

    def __init__(self, inputs: PolicyInputs, start: Start, mesh: Mesh) -> None:
        config: ReinforceRunConfig = start.config
        if config.train.staleness and mesh.size > 1:
            raise UserError(
                f"{start.run.path / REINFORCE_FILE}: staleness: 1 needs one device, as on"
                f" {mesh.size} programs that run at once could wait for each other; set 0"
            )
        self._inputs, self._run, self._train = inputs, start.run, config.train
        self._start = start
        self._tokens_seen = start.saved.meta.tokens_seen if start.saved else 0
        self.model, self.optimizer = model_and_optimizer(start, config.train.total_updates, mesh)
        self.record = inputs.record
        longest, formats = longest_prompt(config), inputs.formats
        self.prompts = Prompts(inputs.tasks, config.train, formats, longest)
        self._sampler = RolloutSampler(self.model, mesh, dtype_of(config.train))
        self._source = CompletionSource(
            config, self._sampler, inputs.stop_tokens, inputs.environments, formats
        )
        weights = inputs.reference
        reference = None if weights is None else load.load_frozen(weights, config, mesh)
        teacher = None if inputs.teacher is None else place_teacher(inputs.teacher, config, mesh)
        self._updater = policy_update.PolicyUpdater(
            config, mesh, reference, teacher, inputs.longest_prompt
        )
        self._files = RolloutFiles(start.run.rollouts, is_first_process())
        self._ahead: tuple[list[Completion], Seconds] | None = None
        """The completions of the next step, sampled while the model was updated."""
        self._wrong_steps, self._latest_step = 0, -1
        self._last_end = time.perf_counter()

    def take(self, step: int, stops: Stops, _: np.float32 | None) -> Sampled:
        """Take a step. A signal before the update abandons it; the next start repeats it."""
        validation = self._validate(None, stops) if step == 0 else None
        file = self._files.step(step)
        updated, seconds = self._sample_and_update(step, file, stops)
        self._files.write(file, updated.completions)
        self._sampler.refresh(self.model)
        return Sampled(updated, seconds, validation)

    def retake(
        self,
        step: int,
        _: np.float32 | None = None,
        *,
        skipped: bool = False,
        is_last: bool = False,
    ) -> Sampled:
        """Take a recorded step again; after the last one nothing is sampled ahead."""
        assert not skipped
        file = self._files.step(step)
        updated, seconds = self._sample_and_update(
            step, file, NEVER, is_replay=True, goes_on=not is_last
        )
        self._sampler.refresh(self.model)
        return Sampled(updated, seconds, None)

    def _sample_and_update(
        self,
        step: int,
        file: Path,
        stops: Stops,
        *,
        is_replay: bool = False,
        goes_on: bool = True,
    ) -> tuple[policy_update.Updated, Seconds]:
        """Take a step whose answers may be in a file. Raises Interrupted before the update."""
        completions, seconds = self._completions(step, file, stops, is_replay)
        if stops.anywhere():
            raise Interrupted
        _report_failures(step, completions)
        self._latest_step = step
        ahead = self._sampling_ahead(step + 1, is_replay=is_replay)
        with ahead if self._train.staleness and goes_on else nullcontext():
            updated = self.update(step, completions)
        return updated, seconds

    def update(self, step: int, completions: list[Completion]) -> policy_update.Updated:
        """Update the model from completions of a step."""
        samples = self._train.samples_per_prompt
        tokens = [prompt.tokens for prompt in self.prompts.of_step(step) for _ in range(samples)]
        return self._updater.update(self.model, self.optimizer, tokens, completions)

    def _completions(
        self, step: int, file: Path, stops: Stops, is_replay: bool
    ) -> tuple[list[Completion], Seconds]:
        """Return the completions of a step. Those that were sampled ahead are in memory or, after
        a start, in their file, which was written before the checkpoint: raises UserError if it is
        gone."""
        if self._ahead is not None:
            return self._ahead
        if self._train.staleness and step > 0:
            return read(file), Seconds(0.0, 0.0)
        return self.sample(step, file, stops, is_replay)

    def sample(
        self, step: int, file: Path, stops: Stops, is_replay: bool
    ) -> tuple[list[Completion], Seconds]:
        """Return the completions of a step; arguments as for `CompletionSource.complete`."""
        prompts, samples = self.prompts.of_step(step), self._train.samples_per_prompt
        return self._source.complete(step, prompts, samples, file, stops.here, is_replay=is_replay)

    @contextmanager
    def _sampling_ahead(self, step: int, *, is_replay: bool) -> Iterator[None]:
        """Sample the completions of the next step meanwhile, after the last one for --extend."""
        self._ahead, file = None, self._files.step(step)
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.sample, step, file, NEVER, is_replay)
            yield
        self._ahead = ahead.result()
        if not is_replay:
            self._files.write(file, self._ahead[0])

    def read(self, step: int, taken: Sampled) -> tuple[PolicyMetrics, StepResult]:
        now = time.perf_counter()
        seconds, self._last_end = now - self._last_end, now
        result = taken.updated.last.step
        tokens = sum(completion.written_tokens for completion in taken.completions)
        self._tokens_seen += tokens
        read = PolicyMetrics(
            **record_fields(self._start, step, result, self._tokens_seen, tokens, seconds),
            **policy_update.policy_fields(taken.updated, self._train),
            sampling_seconds=taken.seconds.sampling,
            verifying_seconds=taken.seconds.verifying,
            start_validation=taken.start_validation,
        )
        self._warn_of_wrong_steps(read)
        return read, result

    def _warn_of_wrong_steps(self, read: PolicyMetrics) -> None:
        self._wrong_steps = 0 if read.correct or self._train.teacher else self._wrong_steps + 1
        if self._wrong_steps == _MANY_WRONG_STEPS:
            log.warning(
                "%d steps in a row without a correct completion, so nothing to learn from; try"
                " easier items, supervised pretraining, more samples or a higher temperature",
                _MANY_WRONG_STEPS,
            )

    def validate(self, metrics: PolicyMetrics, stops: Stops) -> PolicyMetrics:
        step = metrics.global_step
        metrics = dataclasses.replace(metrics, validation=self._validate(step, stops))
        run_on_first(lambda: write_samples(self._run, self._files, step))
        return metrics

    def _validate(self, step: int | None, stops: Stops) -> Validation:
        """Validate after a step; None: before the first. Raises Interrupted."""
        samples, file = self._train.validation_samples, self._files.validation(step)
        prompts = self.prompts.of_validation()
        completions, _ = self._source.complete(None, prompts, samples, file, stops.here)
        self._files.write(file, completions)
        if line := _failures(completions, "count as wrong"):
            log.warning("validation: %s", line)
        return policy_update.summarize(completions, samples)

    def lacks_validation(self, saved: manifest.Checkpoint, _: PolicyMetrics) -> bool:
        is_due = saved.step % saved.meta.train["checkpoint_interval"] == 0
        return is_due and saved.meta.selection_loss is None

    def losses(self, metrics: PolicyMetrics) -> tuple[None, float | None]:
        validation = metrics.validation
        return None, 1 - validation.pass_at_1 if validation else None

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        return self._updater.latest_batch if step == self._latest_step else {}

    @staticmethod
    def headline(steps: Sequence[PolicyMetrics]) -> dict[str, str]:
        shown = {"reward": f"{np.nanmean([step.reward for step in steps]):.3f}"}
        shown["correct"] = f"{np.nanmean([step.correct for step in steps]):.1%}"
        if failed := sum(step.failed_verdicts for step in steps):
            shown["texts without a reward"] = f"{failed:,}"
        for step in steps:
            if step.validation is not None:
                when = run_report.when_measured(step, steps[-1])
                shown["pass@1"] = f"{step.validation.pass_at_1:.1%}{when}"
        return shown

    def log_start(self, start: Start, mesh: Mesh) -> None:
        if not is_first_process():
            return
        inputs, train = self._inputs, self._train
        size = (
            f"{counted(train.prompts_per_step, 'prompt')} ×"
            f" {counted(train.samples_per_prompt, 'completion')} of at most"
            f" {counted(train.max_new_tokens, 'token')}"
        )
        begin, ends = map(inputs.tokenizer.names, (inputs.tokenizer.begin, inputs.stop_tokens))
        texts = f"; prompts begin with {begin}, completions end with {ends}"
        run_report.log_start(start, mesh, train.steps, size, texts)
        for line in _checkup_lines(inputs):
            log.info("%s", line)
        if start.saved is None:
            run_report.warn_of_unused_keys(start.run, start.config)

    @staticmethod
    def summary(run: folder.RunFolder, last: PolicyMetrics | None) -> str:
        steps = list(metrics.stream(run.metrics, PolicyMetrics))
        last = last or next(reversed(steps), None)
        first = next((step.start_validation for step in steps if step.start_validation), None)
        best = StepTable.read(run.metrics).highest_pass_at_1()
        return (
            f"{last.tokens_seen if last else 0:,} tokens sampled in"
            f" {sum(step.step_seconds for step in steps):,.1f} s; pass@1 at the start"
            f" {_pass_at_1(first)}, now {_pass_at_1(last.validation if last else None)}, best"
            f" {f'{best.value:.1%} at step {best.step:,}' if best else 'none'}"
        )


def _checkup_lines(inputs: PolicyInputs) -> Iterator[str]:
    parts = inputs.tasks, inputs.environments, inputs.checkups
    for task, environment, one in zip(*parts, strict=True):
        if one is None:
            yield f"task {task.name}: {environment.name} replies and rewards"
            continue
        paid = [f"{kind} for {count}" for kind, count in one.paid.items() if count]
        yield (
            f"task {task.name}: the verifier {environment.name} pays right answers most, on"
            f" {one.items} items, in {one.median_seconds:.2g} s each"
            + (f"; by accident, it paid {', '.join(paid)}" if paid else "")
        )


def _report_failures(step: int, completions: list[Completion]) -> None:
    """Log failures of verifiers and environments, and odd replies; raise RunFailure if all
    failed."""
    odd = [one.message for one in completions if one.message and one.status == "ok"]
    if odd:
        of = f"{len(odd):,} of {len(completions):,} completions"
        log.warning("step %d: odd replies, in %s; the first: %s", step, of, odd[0])
    line = _failures(completions, "are left out")
    if line and all(completion.status != "ok" for completion in completions):
        raise RunFailure(
            f"step {step}: {line}; nothing is left to learn from, so training stops here"
        )
    if line:
        log.warning("step %d: %s", step, line)


def _failures(completions: Sequence[Completion], what_they_do: str) -> str:
    """Return on how many completions a verifier or environment failed, and why; nothing if none."""
    failed = [completion for completion in completions if completion.status != "ok"]
    if not failed:
        return ""
    of, wrote = f"{len(failed):,} of {len(completions):,}", failed[0].answered_turns[-1].wrote
    return (
        f"the verifier or environment failed on {of} completions, which {what_they_do}; the first,"
        f" on {format_value(wrote)}: {failed[0].message}"
    )


def _pass_at_1(validation: Validation | None) -> str:
    return validation.pass_at_1_text if validation else "not measured"


Checksums = dict[str, dict[str, str]]
"""sha256 of each part of a task, by the task's index and name."""


def record_of(
    configs: Sequence[TaskConfig],
    tasks: Sequence[Task],
    environments: Sequence[Environment],
    beside: Mapping[str, weights_file.Weights | None],
) -> Checksums:
    """Return the checksums of the tasks' files, held-out items and code, and of the weights beside
    those of the run."""
    record: Checksums = {}
    for number, (config, task, opened) in enumerate(zip(configs, tasks, environments, strict=True)):
        held_out = [[item.prompt, item.answer, item.info] for item in task.validation]
        parts = {dataset.VALIDATION: json_checksum(held_out), **task.sha256, **opened.sha256}
        record[f"{number} {config.source}"] = parts
    for name, weights in beside.items():
        if weights is not None:
            record[name] = {weights.path.name: file_checksum(weights.path) or ""}
    return record


def check_same_tasks(before: Checksums, now: Checksums) -> None:
    """Raise UserError if anything that the run was started with has changed."""
    for name, parts in now.items():
        for part, checksum in parts.items():
            was = before.get(name, {}).get(part)
            if was != checksum:
                raise UserError(
                    f"task {name}: {part} is not what this run was started with (sha256 {was}, now"
                    f" {checksum}); restore it, or start over with --fresh"
                )

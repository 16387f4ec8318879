"""Start a run of reinforcement learning: `launch` shows every step in order, from the checks to the
last saved step."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from rungs.checkpointing.load import find_weights
from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.merged_weights import MergedWeights
from rungs.checkpointing.published import all_stop_tokens
from rungs.checkpointing.restore import place_starting_weights
from rungs.checkpointing.saver import Saver
from rungs.checkpointing.start_from import find_starting_weights
from rungs.checkpointing.weights_file import Weights
from rungs.common import disk, run_log
from rungs.common.errors import UserError
from rungs.config.run_config import REINFORCE_FILE, ReinforceRunConfig
from rungs.data.tokenizer import Tokenizer
from rungs.data.tokenizer_files import load_tokenizer
from rungs.model.gpt import GPT
from rungs.model.rollouts import RolloutSampler
from rungs.optim.precision import dtype_of
from rungs.parallel.processes import check_all_agree, is_first_process, run_on_first
from rungs.prompt_samples.prompts import check_sample_prompts
from rungs.reinforcement import report
from rungs.reinforcement.policy_trainer import PolicyTrainer, TaskRecord
from rungs.reinforcement.policy_update import PolicyUpdater
from rungs.reinforcement.prompts import Prompts
from rungs.reinforcement.rollout_files import RolloutFiles
from rungs.reinforcement.samples_page import write_samples
from rungs.reinforcement.sampling import CompletionSource, longest_prompt
from rungs.reinforcement.task_record import check_same_tasks, record_of
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import MetricsLog, NullMetricsLog
from rungs.run.policy_metrics import PolicyMetrics
from rungs.step.state import create_model
from rungs.tasks.opening import open_task
from rungs.tasks.task import Task
from rungs.tasks.verifiers.checkup import Checkup, check
from rungs.tasks.verifiers.opening import Verifier, open_verifier
from rungs.tracking.tracker import check_trackers
from rungs.training.background import Background
from rungs.training.preparation import (
    EXIT_STOPPED_ELSEWHERE,
    create_mesh,
    errors_in,
    find_checkpoint,
    metrics_log,
    mirror_of,
    model_and_optimizer,
    tidy,
    with_device_choices,
    with_recorded_dtype,
)
from rungs.training.resume import refuse_changes

log = logging.getLogger("rungs")


class Inputs(NamedTuple):
    """What a start has found and checked before it changes anything."""

    run: RunFolder
    config: ReinforceRunConfig
    saved: Checkpoint | None
    """The checkpoint to resume from."""
    weights: Weights
    """The weights to continue from."""
    reference: Weights | None
    """The weights that the KL divergence is from."""
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    tasks: list[Task]
    verifiers: list[Verifier]
    checkups: list[Checkup]
    longest_prompt: int
    """Of the tasks, in tokens, as far as it was looked at."""
    record: TaskRecord

    @property
    def first_step(self) -> int:
        return self.saved.step + 1 if self.saved else 0


def launch(
    run: RunFolder,
    config: ReinforceRunConfig,
    start: StartOptions,
    trust_verifier: bool,
) -> int:
    """Take a run's steps to its end, or until a signal.

    Steps 1 to 4 check everything that the user could have got wrong. Nothing on disk changes
    before step 6.

    Args:
        trust_verifier: whether a Python file that a task names may run.

    Returns:
        The exit code: 0 at the end; 128 + the number of a signal that stopped the run, after a
        save.

    Raises:
        UserError: the run, its tasks and its checkpoints don't fit together.
        RunFailure: the run cannot continue, through no mistake of the user.
    """
    # 1. The checkpoint to resume from, and the weights to start from, as in training.
    saved = find_checkpoint(run, start)
    if saved is not None:
        config = config._replace(train=with_recorded_dtype(config.train, saved.meta))
        refuse_changes(saved.meta, config, run, start.extend)
    weights = saved.weights if saved else find_starting_weights(run, config)
    assert weights is not None  # start_from is required
    with ExitStack() as stack:
        # 2. Tokenizer, tasks and verifiers; a verifier that fails or can be tricked is refused.
        inputs = _open(stack, run, config, saved, weights, trust_verifier)
        # 3. A finished run has nothing left to do.
        mirror = mirror_of(run, config.train, start)
        if inputs.first_step >= config.train.steps:
            background = Background(run, config.train, mirror, start, inputs.first_step - 1)
            with background.catching_up():
                run_on_first(lambda: report.log_finished(run, config.train.steps))
            return 0
        # 4. The devices, and what "auto" leaves to them.
        mesh = create_mesh(run, config, saved)
        config = with_device_choices(config, saved)
        # 5. What this start leaves behind moves aside.
        with disk.writing(run.path, "what this start changes"):
            run_on_first(lambda: tidy(run, config.train, saved, start))
        # 6. Model and optimizer are created or restored, then the steps are taken.
        with run_log.log_failures():
            background = Background(run, config.train, mirror, start, inputs.first_step - 1)
            return _train(inputs._replace(config=config), mesh, background)


def open_to_replay(
    stack: ExitStack,
    run: RunFolder,
    config: ReinforceRunConfig,
    saved: Checkpoint | None,
    trust_verifier: bool,
    mesh: Mesh | None = None,
) -> PolicyTrainer:
    """Return a trainer that continues from a checkpoint, or from the start, and records nothing.

    Args:
        mesh: the devices; those of the run if absent.

    Raises:
        UserError: the run, its tasks and its checkpoints don't fit together.
    """
    if saved is not None:
        config = config._replace(train=with_recorded_dtype(config.train, saved.meta))
        refuse_changes(saved.meta, config, run, extend=True)
    weights = saved.weights if saved else find_starting_weights(run, config)
    assert weights is not None
    inputs = _open(stack, run, config, saved, weights, trust_verifier)
    mesh = mesh or create_mesh(run, config, saved)
    config = with_device_choices(config, saved)
    return _make_trainer(inputs._replace(config=config), mesh, (), NullMetricsLog())


def _open(
    stack: ExitStack,
    run: RunFolder,
    config: ReinforceRunConfig,
    saved: Checkpoint | None,
    weights: Weights,
    trust_verifier: bool,
) -> Inputs:
    tokenizer, ends = _tokenizer(run, weights)
    tasks = [open_task(task, run.path) for task in config.train.tasks]
    prompts = Prompts(tasks, config.train, tokenizer, longest_prompt(config))
    longest = prompts.longest()
    check_trackers(config.train.trackers, f"{run.path / REINFORCE_FILE}: trackers")
    with errors_in(run):
        check_sample_prompts(config, _tokenizer_file(run, weights))
    verifiers, checkups = _open_verifiers(stack, run, config, tasks, trust_verifier)
    reference = _reference(run, config)
    record = TaskRecord(
        record_of(config.train.tasks, tasks, verifiers, reference), weights.header.tokenizer
    )
    check_all_agree("configs and tasks", f"{config} {record}")
    if saved is not None:
        check_same_tasks(saved.meta.datasets, record.checksums)
    return Inputs(
        run=run,
        config=config,
        saved=saved,
        weights=weights,
        reference=reference,
        tokenizer=tokenizer,
        stop_tokens=ends,
        tasks=tasks,
        verifiers=verifiers,
        checkups=checkups,
        longest_prompt=longest,
        record=record,
    )


def _tokenizer_file(run: RunFolder, weights: Weights) -> Path:
    """Return the path of the tokenizer of the weights."""
    if weights.tokenizer_file is None:
        raise UserError(
            f"{run.path / REINFORCE_FILE}: start_from: {weights.path} has no tokenizer.json beside"
            " it, which prompts need; start from a checkpoint that has one"
        )
    return weights.tokenizer_file


def _tokenizer(run: RunFolder, weights: Weights) -> tuple[Tokenizer, tuple[int, ...]]:
    """Return the tokenizer of the weights, and the tokens that end a text."""
    tokenizer = load_tokenizer(_tokenizer_file(run, weights))
    ends = all_stop_tokens(weights, tokenizer)
    if not ends:
        raise UserError(
            f"{weights.tokenizer_file}: has no end-of-text token, with which a completion ends"
        )
    return tokenizer, ends


def _open_verifiers(
    stack: ExitStack,
    run: RunFolder,
    config: ReinforceRunConfig,
    tasks: Sequence[Task],
    trust_verifier: bool,
) -> tuple[list[Verifier], list[Checkup]]:
    """Open and check the verifier of each task; the first process checks."""
    verifiers: list[Verifier] = []
    checkups: list[Checkup] = []
    for task_config, task in zip(config.train.tasks, tasks, strict=True):
        opened = open_verifier(task_config, task, run.path, trust_verifier=trust_verifier)
        verifiers.append(stack.enter_context(opened))
    run_on_first(lambda: checkups.extend(map(check, verifiers, tasks)))
    return verifiers, checkups


def _reference(run: RunFolder, config: ReinforceRunConfig) -> Weights | None:
    """Return the weights that the KL divergence is from, None without one."""
    if not config.train.kl_coefficient:
        return None
    name = config.train.reference
    if name is None:
        return find_starting_weights(run, config)
    return MergedWeights(find_weights(name))


def _reference_model(inputs: Inputs, mesh: Mesh) -> GPT | None:
    if inputs.reference is None:
        return None
    config = inputs.config._replace(train=inputs.config.train.model_copy(update={"lora": None}))
    arrays = place_starting_weights(inputs.reference, config, 1, mesh)
    return create_model(config, mesh, arrays)


def _train(inputs: Inputs, mesh: Mesh, background: Background) -> int:
    """Take the steps and return the exit code."""
    run, config = inputs.run, inputs.config
    last_step = inputs.first_step - 1
    written = metrics_log(run, last_step, PolicyMetrics, background.step_taken)
    trainer = _make_trainer(inputs, mesh, (background.checkpoint_saved,), written)
    if is_first_process():
        begin, ends = map(inputs.tokenizer.names, (inputs.tokenizer.begin, inputs.stop_tokens))
        texts = f"prompts begin with {begin}, completions end with {ends}"
        report.log_start(run, config, inputs.saved, inputs.weights, mesh, texts)
        report.log_checkups(inputs.tasks, inputs.verifiers, inputs.checkups)
        if inputs.saved is None:
            report.warn_of_unused_keys(run, config)
    with background:
        last = trainer.train(background.stop)
        taken = last.global_step + 1 if last else inputs.first_step
        is_stopped = taken < config.train.steps
        background.is_complete = not is_stopped
        run_on_first(lambda: report.log_end(run, last, is_stopped))
    return (background.stop.exit_code or EXIT_STOPPED_ELSEWHERE) if is_stopped else 0


def _make_trainer(
    inputs: Inputs,
    mesh: Mesh,
    after_checkpoint: tuple[Callable[[], None], ...],
    written: MetricsLog[PolicyMetrics],
) -> PolicyTrainer:
    run, config, saved = inputs.run, inputs.config, inputs.saved
    steps = config.train.total_updates
    model, optimizer = model_and_optimizer(config, steps, mesh, saved, inputs.weights)
    sampler = RolloutSampler(model, mesh, dtype_of(config.train))
    source = CompletionSource(
        config, sampler, inputs.tokenizer, inputs.stop_tokens, inputs.verifiers
    )
    saver = Saver(
        run.checkpoints,
        config,
        inputs.weights.tokenizer_file,
        written.sync,
        after_checkpoint,
        inputs.weights,
        check=run.check,
    )
    files = RolloutFiles(run.rollouts, is_first_process(), run.check)
    return PolicyTrainer(
        config=config,
        record=inputs.record,
        prompts=Prompts(inputs.tasks, config.train, inputs.tokenizer, longest_prompt(config)),
        source=source,
        sampler=sampler,
        updater=PolicyUpdater(config, mesh, _reference_model(inputs, mesh), inputs.longest_prompt),
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        first_step=inputs.first_step,
        metrics=written,
        saver=saver,
        files=files,
        after_validation=lambda step: run_on_first(lambda: write_samples(run, files, step)),
        tokens_seen=saved.meta.tokens_seen if saved else 0,
        unvalidated=_unvalidated(run, saved),
    )


def _unvalidated(run: RunFolder, saved: Checkpoint | None) -> PolicyMetrics | None:
    """Return the metrics of the checkpoint's step if a signal interrupted its validation."""
    if saved is None or saved.meta.selection_loss is not None:
        return None
    if saved.step % saved.meta.train["checkpoint_interval"]:
        return None
    steps = metrics.stream(run.metrics, PolicyMetrics)
    return next((step for step in steps if step.global_step == saved.step), None)

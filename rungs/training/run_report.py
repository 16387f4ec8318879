"""What `train.log` and the terminal say of a run as it starts and as it ends."""

import logging
import math

import jax
from flax import nnx
from jax.sharding import Mesh

from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.weights_file import Weights
from rungs.common.shown_text import quoted
from rungs.common.text_table import counted
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.config.unused_keys import unused_keys
from rungs.data.loader import TrainingData
from rungs.data.provenance import notes_on_beginnings
from rungs.data.tokenizer import Tokenizer
from rungs.model.gpt import GPT
from rungs.model.layer_loop import layer_loop
from rungs.optim.multi_steps import MultiSteps
from rungs.optim.precision import dtype_of
from rungs.parallel.devices import idle_devices
from rungs.planning import hardware, oom_advice
from rungs.planning.flops import count_active_parameters, count_parameters, model_flops_per_token
from rungs.planning.memory import format_bytes, state_bytes
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.run.metrics import StepMetrics
from rungs.step.state import shapes_of

log = logging.getLogger("rungs")

_MUCH_PADDING = 0.5
"""Share of padding from which packing is suggested."""


def log_start(
    run: RunFolder,
    config: RunConfig,
    data: TrainingData,
    saved: Checkpoint | None,
    weights: Weights | None,
    sharding: ShardingConfig,
) -> None:
    """Log where the run begins, how long it is and what it runs on.

    Args:
        saved: the checkpoint that it resumes from.
        weights: the saved weights that it starts from.
    """
    if saved is not None:
        begins = f"resumes after step {saved.step:,}, {saved.folder.name}"
    else:
        begins = f"starts from {weights.path}" if weights else "starts"
    log.info(
        "%s %s: %s of %s on %s, in %s%s",
        run.path,
        begins,
        counted(data.total_steps, "step"),
        counted(data.tokens_per_step, "token"),
        describe_devices(sharding),
        config.train.compute_dtype,
        describe_loop(config.train, config.model),
    )


def log_validation_change(before: str | None, now: str | None) -> None:
    """Log if validation losses are no longer comparable with those before this start."""
    if now != before:
        log.info(
            "validation data: was %s, is now %s; best compares only losses on the same data, so it"
            " starts over with the next checkpoint; the best one so far is kept",
            *(data or "none (the training loss decides)" for data in (before, now)),
        )


def log_padding(data: TrainingData) -> None:
    """Log which datasets of pairs or chats are mostly padding."""
    for name, share in data.padding.items():
        if share > _MUCH_PADDING:
            log.info(
                'dataset %s: %.0f%% of its sequences is padding; with "documents": "separate" in'
                " train.json, a sequence holds several pairs or chats",
                name,
                100 * share,
            )


def log_beginnings(data: TrainingData, tokenizer: Tokenizer | None) -> None:
    """Log what special tokens the sequences begin with, or lack."""
    for note in notes_on_beginnings(data.datasets, tokenizer) if tokenizer else []:
        log.info("dataset %s", note)


def warn_of_unused_keys(run: RunFolder, config: RunConfig, has_validation: bool) -> None:
    """Log a warning for each key that a file sets although it has no effect."""
    for line in unused_keys(config, has_validation):
        log.warning("%s/%s", run.path, line)


def log_size(
    run: RunFolder,
    config: RunConfig,
    data: TrainingData,
    model: GPT,
    optimizer: MultiSteps,
    mesh: Mesh,
) -> None:
    """Log the part of the plan that takes no tracing: parameters, FLOPs, tokens, memory."""
    shapes = shapes_of(config.model, config.train.lora)
    total = count_parameters(shapes).total
    active = count_active_parameters(shapes, config.model).total
    flops = model_flops_per_token(shapes, config.model, config.sequence_length)
    tokens = data.total_steps * data.tokens_per_step
    log.info(
        "%s parameters%s, %s MFLOPs per token; %s tokens, %.3g per parameter; weights, moments and"
        " gradients take %s of %s on each device; for more: uv run plan.py %s",
        f"{total:,}",
        f", {active:,} active per token" if active < total else "",
        f"{flops / 1e6:,.1f}",
        f"{tokens:,}",
        tokens / active,
        format_bytes(state_bytes(model, optimizer)),
        format_bytes(oom_advice.device_bytes(mesh)),
        quoted(run.path),
    )


def log_trainable(model: GPT, optimizer: MultiSteps) -> None:
    """Log how many parameters are trainable, unless all are."""
    trainable, total = (
        sum(array.size for array in jax.tree.leaves(nnx.state(model, kind)))
        for kind in (optimizer.wrt, nnx.Param)
    )
    if trainable < total:
        log.info("trains %s of %s parameters", f"{trainable:,}", f"{total:,}")


def log_end(run: RunFolder, config: RunConfig, last: StepMetrics, is_stopped: bool) -> None:
    """Log what the run has come to."""
    steps = metrics.read(run.metrics)
    seconds = sum(step.step_seconds for step in steps)
    best = metrics.best_step(steps, config.train.checkpoint_interval)
    losses = {"train loss": last.train_loss, "validation loss": last.validation_loss}
    log.info(
        "%s after step %s: %s tokens in %s s, %s tokens/s; %s; best %s",
        "stopped" if is_stopped else "finished",
        f"{last.global_step:,}",
        f"{last.tokens_seen:,}",
        f"{seconds:,.1f}",
        f"{last.tokens_seen / seconds:,.0f}",
        ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if loss is not None),
        f"at step {best.global_step:,}" if best else "none",
    )
    if is_stopped:
        log.info("to resume: uv run train.py %s", quoted(run.path))


def peak_tokens_per_second(config: RunConfig, mesh: Mesh) -> float | None:
    """Return the tokens per second at the devices' peak FLOP/s, None if that is not known."""
    model, train = config
    kind = hardware.device_of_kind(mesh.devices.flat[0].device_kind)
    peak = kind and kind.peak(dtype_of(train))
    if not peak:
        return None
    shapes = shapes_of(model, train.lora)
    return mesh.size * peak / model_flops_per_token(shapes, model, config.sequence_length)


def warn_of_idle_devices(train: TrainConfig, mesh: Mesh) -> None:
    """Warn if some accelerators have nothing to do. Virtual CPU devices share all cores."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    line = None if is_cpu else idle_devices(train, mesh.size, jax.device_count())
    if line:
        log.warning("%s", line)


def describe_loop(train: OptimizationConfig, model: ModelConfig) -> str:
    """Return how the layers run, for the log; nothing if there are none."""
    if not model.n_layers:
        return ""
    remat, unroll = layer_loop(train, model)
    return f", remat {remat}, scan_unroll {unroll}"


def describe_devices(sharding: ShardingConfig) -> str:
    """Return a mesh in words, for the log."""
    count = math.prod(sharding.sizes)
    devices = counted(count, f"{jax.devices()[0].device_kind} device")
    if count > 1:
        devices += f", {sharding.mode}" + f": {sharding.text}" * (sharding.sizes[1] > 1)
    processes = jax.process_count()
    return devices + f", {processes} processes" * (processes > 1)

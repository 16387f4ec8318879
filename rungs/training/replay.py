"""Repeat a failed step and name its first non-finite tensor. Training repeats the steps from the
checkpoint on. Then each dropped microbatch goes through the model module by module, forward and
backward, and each tensor is printed. Axes as in `rungs/model/gpt.py`; A microbatches."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from rungs.checkpointing.load import Start, find_starting_weights
from rungs.common.errors import errors_at
from rungs.common.shown_text import counted
from rungs.config.train_config import TrainConfig
from rungs.model.attention import AttentionContext, sequence_contexts
from rungs.model.blocks import Block, block_graphs, layer_contexts
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.layers import Dropout
from rungs.model.positions import own_positions
from rungs.model.weight_formats import cast, unstack_layers
from rungs.optim.precision import dtype_of
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel import jax_setup, sharding
from rungs.parallel.devices import create_run_mesh
from rungs.parallel.sharding import dotted
from rungs.run.folder import RunFolder, StartOptions
from rungs.step.nonfinite import checked_names, describe_first, finite_flags, nonfinite_names
from rungs.step.objective import Objective
from rungs.step.state import AbstractState, copy_bytes, named_arrays
from rungs.step.train_step import StepResult, dropout_key
from rungs.training.failed_steps import FailedStep, open_failed_step
from rungs.training.learner import Kind, Replayed
from rungs.training.run_length import run_length
from rungs.training.start import model_and_optimizer

OnOutput = Callable[[str, Array], None]
"""Called with the name of a module and its output."""


class NotFinite(Exception):
    """Raised at the first non-finite tensor."""


class Stage(NamedTuple):
    """A part of the model that is differentiated on its own."""

    name: str
    module: Any
    apply: Callable[[Any, Any], Array]
    """From the module and its input to its output."""


def replay(run: RunFolder, name: str, kind: Kind) -> int:
    """Repeat a failed step, such as `step-000123`, and print each tensor until one is not finite.
    Return the exit code: 1 if a tensor is not finite, else 0. Raises UserError if the failed step,
    its checkpoint, the data or the devices are missing or have changed."""
    failed = open_failed_step(run, name)
    copies = functools.partial(copy_bytes, failed.config)
    jax_setup.prepare(failed.config.train, copies, failed.meta.sharding)
    with errors_at(f"{failed.folder}: ", ValueError):
        mesh = create_run_mesh(failed.config.train, failed.config.model, failed.meta.sharding)
    saved = failed.checkpoint
    weights = saved.weights if saved else find_starting_weights(run, failed.config)
    start = Start(run, failed.config, StartOptions(), saved, weights)
    try:
        model, optimizer = _retrain(failed, start, mesh, kind)
        replayed = kind.replayed(start, mesh)
        arrays = tuple(failed.batch.get(name) for name in replayed.array_names)
        whole = named_arrays(model, failed.config.model.vocab_size)
        here = {name: jnp.asarray(np.asarray(array)) for name, array in whole.items()}
        local_model = AbstractState(failed.config, failed.meta.total_steps).fill(here, {})[0]
        for number in failed.meta.bad:
            microbatch = jax.tree.map(lambda array, at=number: jnp.asarray(array[at]), arrays)
            one = _Microbatch(failed, replayed.objective, microbatch, number)
            _check_microbatch(one, local_model, optimizer.wrt)
        if failed.meta.bad:
            _check_compiled_step(replayed, arrays, mesh, model, optimizer)
    except NotFinite:
        return 1
    click.echo("all tensors are finite this time: suspect the hardware")
    return 0


def _retrain(
    failed: FailedStep, start: Start, mesh: Mesh, kind: Kind
) -> tuple[GPT, SkippingOptimizer]:
    """Return model and optimizer before the failed step or, if no microbatch was dropped and so
    weights or moments became non-finite, after it."""
    meta, saved, first = failed.meta, start.saved, start.first_step
    last = meta.global_step if meta.bad else meta.global_step + 1
    origin = saved.folder if saved else "the start"
    click.echo(f"step {meta.global_step}, from {origin}: {counted(last - first, 'step')} retrained")
    if first == last:  # without need of data
        return model_and_optimizer(start, meta.total_steps, mesh)
    with ExitStack() as stack:
        inputs = kind.open_inputs(start, stack)
        learner, length = inputs.learner(start, mesh, ()), run_length(start, inputs.total_steps)
        for step in range(first, last):
            is_skipped = step in meta.skipped_steps
            learner.retake(step, length.learning_rate(step), skipped=is_skipped)
            arrays = named_arrays(learner.model) | named_arrays(learner.optimizer)
            for name in nonfinite_names(finite_flags(arrays)):
                click.echo(f"after step {step}: {name} is the first tensor that is not finite")
                raise NotFinite
    return learner.model, learner.optimizer


class _Microbatch(NamedTuple):
    failed: FailedStep
    objective: Objective
    arrays: tuple[Any, ...]
    """(B, S) each, inputs first; possibly None."""
    number: int


def _check_microbatch(one: _Microbatch, model: GPT, wrt: Any) -> None:
    """Go forward, then backward; raise NotFinite at the first non-finite tensor."""
    reason = one.failed.meta.bad[one.number]
    click.echo(f"microbatch {one.number}, which was dropped because of {reason}")
    calls: list[str] = []

    def on_output(name: str, array: Array) -> None:
        calls.append(name)
        _print_tensor(name, array)

    inputs: list[Any] = [None]
    stages = list(_stages(one, model))
    for stage in stages:
        inputs.append(stage.apply(_observed(stage, on_output), inputs[-1]))
    logits_BSV, arrays = inputs.pop(), one.arrays[1:]
    on_output("head", logits_BSV)
    on_output("the loss of each target", target_losses(logits_BSV, arrays[0]))
    cotangent = jax.grad(one.objective.of_logits)(logits_BSV, *arrays)
    _print_tensor("gradient of the logits", cotangent)
    for stage, x in zip(reversed(stages), reversed(inputs), strict=True):
        cotangent = _backward(stage, wrt, x, cotangent, calls)


def _check_compiled_step(
    replayed: Replayed,
    arrays: tuple[Any, ...],
    mesh: Mesh,
    model: GPT,
    optimizer: SkippingOptimizer,
) -> None:
    """Run all microbatches as in training; raise NotFinite if anything is not finite. Covers what
    no single module computes: gradient norm, sums over modules or devices, compiled code."""
    names = checked_names(model, optimizer.wrt)
    result = replayed.step(model, optimizer, *sharding.place_batch(mesh, *arrays))
    if bad := StepResult(*jax.device_get(tuple(result))).nonfinite(names):
        click.echo("all microbatches, compiled as in training")
        click.echo(f"{describe_first(bad)} is the first tensor that is not finite")
        raise NotFinite


def _stages(one: _Microbatch, model: GPT) -> Iterator[Stage]:
    """Yield the embedding, each layer, and the head."""
    train, config = one.failed.config.train, one.failed.config.model
    inputs_BS, starts_BS = one.arrays[0], one.objective.starts(*one.arrays)
    rows, length = inputs_BS.shape
    key = dropout_key(train, one.failed.meta.global_step)
    drop_rate = train.drop_rate if isinstance(train, TrainConfig) else 0.0
    dropout = Dropout.of(drop_rate, key, one.number * rows + jnp.arange(rows))
    outer = nnx.merge(*nnx.split(model))
    blocks, outer.blocks = outer.blocks, None

    def embed(outer: GPT, _: None) -> Array:
        x_BSD = outer.embed(inputs_BS, own_positions(length, starts_BS)).astype(dtype_of(train))
        return dropout.fold(0)(x_BSD)

    yield Stage("embedding", outer, embed)
    if blocks is not None:
        contexts = sequence_contexts(config, length, starts_BS)
        graphs = block_graphs(config, blocks)
        layers = unstack_layers(nnx.state(blocks), config.n_layers, cast(jnp.dtype(jnp.float32)))
        values = outer.embed_values(inputs_BS, dtype_of(train))
        of_layers = layer_contexts(config, contexts, embed(outer, None), values)
        parts = zip(graphs, of_layers, layers, strict=True)
        for layer, (graph, context, state) in enumerate(parts):
            apply = functools.partial(
                _apply_block, context=context, dropout=dropout.fold(layer + 1)
            )
            yield Stage(f"blocks.{layer}", nnx.merge(graph, state), apply)
    yield Stage("head", outer, lambda outer, x_BSD: outer.unembed(x_BSD))


def _apply_block(block: Block, x_BSD: Array, context: AttentionContext, dropout: Dropout) -> Array:
    return block(x_BSD, context, dropout)[0]


class _Observed:
    """A module that reports its outputs."""

    def __init__(self, module: nnx.Module, name: str, on_output: OnOutput) -> None:
        self._module, self._name, self._on_output = module, name, on_output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._module(*args, **kwargs)
        self._on_output(self._name, jax.tree.leaves(result)[0])
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _observed(stage: Stage, on_output: OnOutput) -> Any:
    """Return a copy of a stage's module that reports the outputs of all modules in it."""
    prefix = [stage.name] if stage.name.startswith("blocks") else []
    whole = nnx.merge(*nnx.split(stage.module))
    for path, module in list(nnx.iter_modules(whole)):
        if path:
            *parents, name = map(str, path)
            observed = _Observed(module, ".".join([*prefix, *parents, name]), on_output)
            object.__setattr__(functools.reduce(getattr, parents, whole), name, observed)
    return _Observed(whole, ".".join(prefix) or type(whole).__name__, on_output)


def _backward(stage: Stage, wrt: Any, x: Any, cotangent: Array, calls: list[str]) -> Any:
    """Print the gradients of a stage's parameters, last used first; return its input's gradient."""
    graph, *states = nnx.split(stage.module, wrt, ...)
    trained, rest = states

    def apply(trained: nnx.State, x: Any) -> Array:
        return stage.apply(nnx.merge(graph, trained, rest), x)

    _, pull = jax.vjp(apply, trained, x)
    gradient, dx = pull(cotangent)
    prefix = f"{stage.name}." if stage.name.startswith("blocks") else ""
    flat = {prefix + dotted(path): v.get_value() for path, v in nnx.to_flat_state(gradient)}
    last_calls = {module: at for at, module in enumerate(calls)}
    for name in sorted(flat, key=lambda name: -last_calls.get(name.rpartition(".")[0], -1)):
        if flat[name].any():
            _print_tensor(f"gradient of {name}", flat[name])
    if dx is not None:
        _print_tensor(f"gradient of the input of {stage.name}", dx)
    return dx


def _print_tensor(name: str, array: Array) -> None:
    """Print a line about a tensor; raise NotFinite if it is not finite."""
    values = np.asarray(array, np.float32)
    shape, bad = "×".join(map(str, values.shape)) or "1", ~np.isfinite(values)
    if not bad.any():
        click.echo(f"  {name:50} {shape:>15}  at most {np.abs(values).max(initial=0):.4g}")
        return
    place = ", ".join(str(at) for at in np.argwhere(bad)[0])
    click.echo(
        f"  {name:50} {shape:>15}  {bad.sum():,} of {bad.size:,} not finite, the first at [{place}]"
    )
    click.echo(f"{name} is the first tensor that is not finite")
    raise NotFinite

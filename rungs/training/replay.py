"""Run a failed step again and name its first tensor that is not finite.

Training repeats the steps from the checkpoint up to the failed one. Then each dropped microbatch
goes through the model module by module, forward and backward, and each tensor is printed.
Axes are named as in `rungs/model/gpt.py`; A counts microbatches.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from rungs.checkpointing.start_from import find_starting_weights
from rungs.common.errors import UserError
from rungs.common.text_table import counted
from rungs.data.catalog import open_dataset
from rungs.data.loader import TrainingData
from rungs.data.provenance import Provenance
from rungs.model.attention import AttentionContext, sequence_contexts
from rungs.model.blocks import Block
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.layers import Dropout
from rungs.model.positions import own_positions
from rungs.model.weight_formats import cast, unstack_layers
from rungs.optim.multi_steps import MultiSteps
from rungs.optim.precision import dtype_of
from rungs.parallel import jax_setup
from rungs.parallel.devices import create_run_mesh
from rungs.parallel.names import dotted
from rungs.parallel.sharding import place_batch
from rungs.run.folder import RunFolder
from rungs.step.nonfinite import checked_names, describe_first, finite_flags, nonfinite_names
from rungs.step.state import AbstractState, copy_bytes, named_arrays
from rungs.step.train_step import StepResult, dropout_key, make_train_step
from rungs.training.failed_step import FailedStep, open_failed_step
from rungs.training.preparation import model_and_optimizer

OnOutput = Callable[[str, Array], None]
"""Called with the name of a module and its output."""


class NotFinite(Exception):
    """Raised at the first tensor that is not finite."""


class Stage(NamedTuple):
    """A part of the model that is differentiated on its own."""

    name: str
    module: Any
    apply: Callable[[Any, Any], Array]
    """Maps the module and its input to its output."""


def replay(run: RunFolder, name: str, datasets_dir: Path) -> int:
    """Run a failed step again and print each tensor until one is not finite.

    Args:
        run: the run folder.
        name: the failed step, such as `step-000123`.
        datasets_dir: where the datasets are.

    Returns:
        The exit code: 1 if a tensor is not finite, 0 if all are finite.

    Raises:
        UserError: the failed step, its checkpoint, the datasets or the devices are missing or have
            changed.
    """
    failed = open_failed_step(run, name)
    copies = functools.partial(copy_bytes, failed.config)
    jax_setup.prepare(failed.config.train, copies, failed.meta.sharding)
    mesh = _recorded_mesh(failed)
    try:
        model, optimizer = _retrain(run, failed, mesh, datasets_dir)
        local_model = _on_one_device(failed, model)
        for number in failed.meta.bad:
            _check_microbatch(failed, local_model, optimizer.wrt, number)
        if failed.meta.bad:
            _check_compiled_step(failed, mesh, model, optimizer)
    except NotFinite:
        return 1
    click.echo("all tensors are finite this time: suspect the hardware")
    return 0


def _recorded_mesh(failed: FailedStep) -> Mesh:
    try:
        return create_run_mesh(failed.config.train, failed.config.model, failed.meta.sharding)
    except ValueError as error:
        lines = str(error).splitlines()
        raise UserError("\n".join(f"{failed.folder}: {line}" for line in lines)) from None


def _retrain(
    run: RunFolder, failed: FailedStep, mesh: Mesh, datasets_dir: Path
) -> tuple[GPT, MultiSteps]:
    """Return model and optimizer as they were before the failed step.

    If no microbatch was dropped, weights or moments were not finite after the step: train it too.
    """
    config, meta, saved = failed.config, failed.meta, failed.checkpoint
    first = saved.step + 1 if saved else 0
    last = meta.global_step if meta.bad else meta.global_step + 1
    before = find_starting_weights(run, config) if saved is None else None
    model, optimizer = model_and_optimizer(config, meta.total_steps, mesh, saved, before)
    origin = saved.folder if saved else "the start"
    click.echo(f"step {meta.global_step}, from {origin}: {counted(last - first, 'step')} retrained")
    if first == last:
        return model, optimizer
    data, train_step = _data(failed, datasets_dir), make_train_step(config.train, mesh)
    for step in range(first, last):
        batch = place_batch(mesh, *data.batch(step))
        limit = -np.inf if step in meta.skipped_steps else np.inf
        limits = {"loss_limit": limit} if config.train.skip_spikes else {}
        train_step(model, optimizer, *batch, **limits)
        for name in nonfinite_names(finite_flags(named_arrays(model) | named_arrays(optimizer))):
            click.echo(f"after step {step}: {name} is the first tensor that is not finite")
            raise NotFinite
    return model, optimizer


def _data(failed: FailedStep, datasets_dir: Path) -> TrainingData:
    train = failed.config.train
    datasets = {name: open_dataset(name, datasets_dir, update=False) for name in train.datasets}
    if failed.checkpoint is not None:
        before = failed.checkpoint.meta.datasets
        Provenance.of(train, datasets).check_same_tokens(before)
    return TrainingData(failed.config, datasets)


def _on_one_device(failed: FailedStep, model: GPT) -> GPT:
    arrays = named_arrays(model, failed.config.model.vocab_size)
    here = {name: jnp.asarray(np.asarray(array)) for name, array in arrays.items()}
    return AbstractState(failed.config, failed.meta.total_steps).fill(here, {})[0]


def _check_microbatch(failed: FailedStep, model: GPT, wrt: Any, number: int) -> None:
    """Go forward, then backward; raise NotFinite at the first tensor that is not finite."""
    click.echo(f"microbatch {number}, which was dropped because of {failed.meta.bad[number]}")
    calls: list[str] = []

    def on_output(name: str, array: Array) -> None:
        calls.append(name)
        _print_tensor(name, array)

    inputs: list[Any] = [None]
    stages = list(_stages(failed, model, number))
    for stage in stages:
        with _outputs_of(stage, on_output):
            inputs.append(stage.apply(stage.module, inputs[-1]))
    logits_BSV, targets_BS = inputs.pop(), jnp.asarray(failed.batch.targets_ABS[number])
    on_output("head", logits_BSV)
    on_output("the loss of each target", target_losses(logits_BSV, targets_BS))
    cotangent = jax.grad(lambda logits_BSV: target_losses(logits_BSV, targets_BS).mean())(
        logits_BSV
    )
    _print_tensor("gradient of the logits", cotangent)
    for stage, x in zip(reversed(stages), reversed(inputs), strict=True):
        cotangent = _backward(stage, wrt, x, cotangent, calls)


def _check_compiled_step(failed: FailedStep, mesh: Mesh, model: GPT, optimizer: MultiSteps) -> None:
    """Run all microbatches as in training; raise NotFinite if something is not finite.

    This finds what no single module computes: the gradient norm, sums over modules or devices,
    errors of the compiled code.
    """
    names = checked_names(model, optimizer.wrt)
    batch = place_batch(mesh, *failed.batch)
    result = make_train_step(failed.config.train, mesh)(model, optimizer, *batch)
    if bad := StepResult(*jax.device_get(tuple(result))).nonfinite(names):
        click.echo("all microbatches, compiled as in training")
        click.echo(f"{describe_first(bad)} is the first tensor that is not finite")
        raise NotFinite


def _stages(failed: FailedStep, model: GPT, number: int) -> Iterator[Stage]:
    """Yield the embedding, each layer, and the head."""
    train, config = failed.config.train, failed.config.model
    batch: Any = jax.tree.map(lambda array: jnp.asarray(array[number]), tuple(failed.batch))
    inputs_BS, _, starts_BS = batch
    rows, length = inputs_BS.shape
    key = dropout_key(train, failed.meta.global_step)
    dropout = Dropout.of(train.drop_rate, key, number * rows + jnp.arange(rows))
    outer = nnx.merge(*nnx.split(model))
    blocks, outer.blocks = outer.blocks, None

    def embed(outer: GPT, _: None) -> Array:
        x_BSD = outer.embed(inputs_BS, own_positions(length, starts_BS)).astype(dtype_of(train))
        return dropout.fold(0)(x_BSD)

    yield Stage("embedding", outer, embed)
    if blocks is not None:
        contexts = sequence_contexts(config, length, starts_BS)
        graph, stacked = nnx.split(blocks)
        layers = unstack_layers(stacked, config.n_layers, cast(jnp.dtype(jnp.float32)))
        for layer, (kind, state) in enumerate(zip(config.layer_kinds(), layers, strict=True)):
            apply = functools.partial(
                _apply_block, context=contexts[kind], dropout=dropout.fold(layer + 1)
            )
            yield Stage(f"blocks.{layer}", nnx.merge(graph, state), apply)
    yield Stage("head", outer, lambda outer, x_BSD: outer.unembed(x_BSD))


def _apply_block(block: Block, x_BSD: Array, context: AttentionContext, dropout: Dropout) -> Array:
    return block(x_BSD, context, dropout)[0]


@contextlib.contextmanager
def _outputs_of(stage: Stage, on_output: OnOutput) -> Iterator[None]:
    """Within this context, call `on_output` with the output of each module of the stage."""
    is_block = stage.name.startswith("blocks")
    names = {
        id(module): ".".join([*([stage.name] if is_block else []), *map(str, path)])
        for path, module in nnx.iter_modules(stage.module)
    }
    kinds = {type(module) for _, module in nnx.iter_modules(stage.module)}
    originals = {kind: kind.__call__ for kind in kinds}

    def observing(call: Callable[..., Any]) -> Callable[..., Any]:
        def observed(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(module, *args, **kwargs)
            on_output(names.get(id(module), type(module).__name__), jax.tree.leaves(result)[0])
            return result

        return observed

    for kind, call in originals.items():
        kind.__call__ = observing(call)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, call in originals.items():
            kind.__call__ = call  # type: ignore[method-assign]


def _backward(stage: Stage, wrt: Any, x: Any, cotangent: Array, calls: list[str]) -> Any:
    """Print the gradients of a stage's parameters, the last used first.

    Returns:
        The gradient of the stage's input.
    """
    graph, *states = nnx.split(stage.module, wrt, ...)
    trained, rest = states

    def apply(trained: nnx.State, x: Any) -> Array:
        return stage.apply(nnx.merge(graph, trained, rest), x)

    _, pull = jax.vjp(apply, trained, x)
    gradient, dx = pull(cotangent)
    prefix = f"{stage.name}." if stage.name.startswith("blocks") else ""
    flat = {prefix + dotted(path): v.get_value() for path, v in nnx.to_flat_state(gradient)}
    for name in sorted(flat, key=lambda name: -_last_call(name, calls)):
        if flat[name].any():
            _print_tensor(f"gradient of {name}", flat[name])
    if dx is not None:
        _print_tensor(f"gradient of the input of {stage.name}", dx)
    return dx


def _last_call(name: str, calls: list[str]) -> int:
    module = name.rpartition(".")[0]
    return max((at for at, other in enumerate(calls) if other == module), default=-1)


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

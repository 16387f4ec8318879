"""A step that went wrong, done again from its capsule: trained up to it from the checkpoint, then
module by module, until a tensor is not finite. Axes as in `model.py`, and A for microbatches.
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
from rungs.data.catalog import open_dataset
from rungs.data.loader import TrainingData
from rungs.data.provenance import Provenance
from rungs.model.attention import View, views
from rungs.model.generation import unstacked
from rungs.model.gpt import GPT, Block
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.layers import Dropout
from rungs.optim.multi_steps import MultiSteps
from rungs.optim.precision import dtype_of
from rungs.parallel import jax_setup
from rungs.parallel.devices import create_run_mesh
from rungs.parallel.names import dotted
from rungs.parallel.sharding import place_batch
from rungs.run.folder import RunFolder
from rungs.step.nonfinite import checked_names, describe_first, finite_flags, nonfinite_names
from rungs.step.state import AbstractState, named_arrays
from rungs.step.train_step import StepResult, dropout_key, make_train_step
from rungs.training.failed_step import Capsule, open_capsule
from rungs.training.start import model_and_optimizer

Note = Callable[[str, Array], None]


class NotFinite(Exception):
    """The first tensor that is not finite has been met."""


class Stage(NamedTuple):
    """A part of the model that is differentiated by itself."""

    name: str
    module: Any
    apply: Callable[[Any, Any], Array]
    """Of the module and what it is given."""


def replay(run: RunFolder, name: str, datasets_dir: Path) -> int:
    """Do a capsule's step again, and print each tensor until one is not finite.

    Returns:
        The exit code: 1 where one is not, 0 where all are.

    Raises:
        UserError: the capsule, its checkpoint, the datasets or the devices are not there, or not as
            they were.
    """
    capsule = open_capsule(run, name)
    jax_setup.prepare(capsule.config.train, capsule.meta.sharding)
    mesh = _mesh_as_it_was(capsule)
    try:
        model, optimizer = _trained_again(run, capsule, mesh, datasets_dir)
        alone = _on_one_device(capsule, model)
        for number in capsule.meta.bad:
            _through_microbatch(capsule, alone, optimizer.wrt, number)
        if capsule.meta.bad:
            _through_step(capsule, mesh, model, optimizer)
    except NotFinite:
        return 1
    click.echo("all finite: this time nothing went wrong, so the hardware may have")
    return 0


def _mesh_as_it_was(capsule: Capsule) -> Mesh:
    try:
        return create_run_mesh(capsule.config.train, capsule.config.model, capsule.meta.sharding)
    except ValueError as error:
        lines = str(error).splitlines()
        raise UserError("\n".join(f"{capsule.folder}: {line}" for line in lines)) from None


def _trained_again(
    run: RunFolder, capsule: Capsule, mesh: Mesh, datasets_dir: Path
) -> tuple[GPT, MultiSteps]:
    """Model and optimizer as they were before the step or, where it is they that were not finite,
    after it."""
    config, meta, saved = capsule.config, capsule.meta, capsule.checkpoint
    first = saved.step + 1 if saved else 0
    last = meta.global_step if meta.bad else meta.global_step + 1
    before = find_starting_weights(run, config) if saved is None else None
    model, optimizer = model_and_optimizer(config, meta.total_steps, mesh, saved, before)
    came_from = saved.folder if saved else "the start"
    click.echo(f"step {meta.global_step}, from {came_from}: {last - first} steps trained again")
    if first == last:
        return model, optimizer
    data, train_step = _data(capsule, datasets_dir), make_train_step(config.train, mesh)
    for step in range(first, last):
        batch = place_batch(mesh, *data.batch(step))
        limit = -np.inf if step in meta.skipped_steps else np.inf
        limits = (limit,) if config.train.skip_spikes else ()
        train_step(model, optimizer, *batch, *limits)
        for name in nonfinite_names(finite_flags(named_arrays(model) | named_arrays(optimizer))):
            click.echo(f"after step {step}: {name} is the first that is not finite")
            raise NotFinite
    return model, optimizer


def _data(capsule: Capsule, datasets_dir: Path) -> TrainingData:
    train = capsule.config.train
    datasets = {name: open_dataset(name, datasets_dir, update=False) for name in train.datasets}
    if capsule.checkpoint is not None:
        before = capsule.checkpoint.meta.datasets
        Provenance.of(train, datasets).refuse_other_than(before)
    return TrainingData(capsule.config, datasets)


def _on_one_device(capsule: Capsule, model: GPT) -> GPT:
    arrays = named_arrays(model, capsule.config.model.vocab_size)
    here = {name: jnp.asarray(np.asarray(array)) for name, array in arrays.items()}
    return AbstractState(capsule.config, capsule.meta.total_steps).fill(here, {})[0]


def _through_microbatch(capsule: Capsule, model: GPT, wrt: Any, number: int) -> None:
    """Forward, then backward; raises NotFinite at the first tensor that is not."""
    click.echo(f"microbatch {number}, which was left out because of {capsule.meta.bad[number]}")
    called: list[str] = []

    def note(name: str, array: Array) -> None:
        called.append(name)
        _show(name, array)

    given: list[Any] = [None]
    stages = list(_stages(capsule, model, number))
    for stage in stages:
        with _observed(stage, note):
            given.append(stage.apply(stage.module, given[-1]))
    logits_BSV, targets_BS = given.pop(), jnp.asarray(capsule.batch.targets_ABS[number])
    note("head", logits_BSV)
    note("the loss of each target", target_losses(logits_BSV, targets_BS))
    cotangent = jax.grad(lambda logits_BSV: target_losses(logits_BSV, targets_BS).mean())(
        logits_BSV
    )
    _show("gradient of the logits", cotangent)
    for stage, x in zip(reversed(stages), reversed(given), strict=True):
        cotangent = _backward(stage, wrt, x, cotangent, called)


def _through_step(capsule: Capsule, mesh: Mesh, model: GPT, optimizer: MultiSteps) -> None:
    """All microbatches as training has them; raises NotFinite where what no module gave is not
    finite: a norm, what is summed over modules or devices, what the compiler made of it."""
    names = checked_names(model, optimizer.wrt)
    batch = place_batch(mesh, *capsule.batch)
    result = make_train_step(capsule.config.train, mesh)(model, optimizer, *batch)
    if bad := StepResult(*jax.device_get(tuple(result))).nonfinite(names):
        click.echo("the whole step, compiled as in training")
        click.echo(f"{describe_first(bad)} is the first that is not finite")
        raise NotFinite


def _stages(capsule: Capsule, model: GPT, number: int) -> Iterator[Stage]:
    """Embedding, each layer, and the head."""
    train, config = capsule.config.train, capsule.config.model
    inputs_BS = jnp.asarray(capsule.batch.inputs_ABS[number])
    rows, length = inputs_BS.shape
    key = dropout_key(train, capsule.meta.global_step)
    dropout = Dropout.of(train.drop_rate, key, number * rows + jnp.arange(rows))
    outer = nnx.merge(*nnx.split(model))
    blocks, outer.blocks = outer.blocks, None

    def embed(outer: GPT, _: None) -> Array:
        x_BSD = outer.embed(inputs_BS, jnp.arange(length)).astype(dtype_of(train))
        return dropout.fold(0)(x_BSD)

    yield Stage("embedding", outer, embed)
    if blocks is not None:
        seen = views(config, length)
        graph, stacked = nnx.split(blocks)
        layers = unstacked(stacked, config.n_layers, jnp.float32, take_over=False)
        for layer, (kind, state) in enumerate(zip(config.layer_kinds(), layers, strict=True)):
            through = functools.partial(_through, view=seen[kind], dropout=dropout.fold(layer + 1))
            yield Stage(f"blocks.{layer}", nnx.merge(graph, state), through)
    yield Stage("head", outer, lambda outer, x_BSD: outer.unembed(x_BSD))


def _through(block: Block, x_BSD: Array, view: View, dropout: Dropout) -> Array:
    return block(x_BSD, view, dropout)[0]


@contextlib.contextmanager
def _observed(stage: Stage, note: Note) -> Iterator[None]:
    """Note what each module gives, while entered."""
    inside = stage.name.startswith("blocks")
    names = {
        id(module): ".".join([*([stage.name] if inside else []), *map(str, path)])
        for path, module in nnx.iter_modules(stage.module)
    }
    kinds = {type(module) for _, module in nnx.iter_modules(stage.module)}
    former = {kind: kind.__call__ for kind in kinds}

    def observing(call: Callable[..., Any]) -> Callable[..., Any]:
        def observed(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(module, *args, **kwargs)
            note(names.get(id(module), type(module).__name__), jax.tree.leaves(result)[0])
            return result

        return observed

    for kind, call in former.items():
        kind.__call__ = observing(call)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, call in former.items():
            kind.__call__ = call  # type: ignore[method-assign]


def _backward(stage: Stage, wrt: Any, x: Any, cotangent: Array, called: list[str]) -> Any:
    """The gradient of what a stage was given; that of its parameters is shown, the last first."""
    graph, *states = nnx.split(stage.module, wrt, ...)
    trained, rest = states

    def apply(trained: nnx.State, x: Any) -> Array:
        return stage.apply(nnx.merge(graph, trained, rest), x)

    _, pull = jax.vjp(apply, trained, x)
    gradient, dx = pull(cotangent)
    prefix = f"{stage.name}." if stage.name.startswith("blocks") else ""
    flat = {prefix + dotted(path): v.get_value() for path, v in nnx.to_flat_state(gradient)}
    for name in sorted(flat, key=lambda name: -_last_call(name, called)):
        if flat[name].any():
            _show(f"gradient of {name}", flat[name])
    if dx is not None:
        _show(f"gradient of what goes into {stage.name}", dx)
    return dx


def _last_call(name: str, called: list[str]) -> int:
    module = name.rpartition(".")[0]
    return max((at for at, other in enumerate(called) if other == module), default=-1)


def _show(name: str, array: Array) -> None:
    """A line on a tensor; raises NotFinite where it is not."""
    values = np.asarray(array, np.float32)
    shape, bad = "×".join(map(str, values.shape)) or "1", ~np.isfinite(values)
    if not bad.any():
        click.echo(f"  {name:50} {shape:>15}  at most {np.abs(values).max(initial=0):.4g}")
        return
    place = ", ".join(str(at) for at in np.argwhere(bad)[0])
    click.echo(
        f"  {name:50} {shape:>15}  {bad.sum():,} of {bad.size:,} not finite, the first at [{place}]"
    )
    click.echo(f"{name} is the first that is not finite")
    raise NotFinite

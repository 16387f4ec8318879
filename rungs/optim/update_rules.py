"""How each optimizer turns a gradient into a direction, before learning rate and weight decay.

Parameters are told apart by what they declare, as in `layers.py`, never by their number of
dimensions: stacked layers give all of them one more.
"""

import functools
import math
from typing import Any

import jax
import optax
from flax import nnx
from jax import Array
from optax import contrib

from rungs.config.train_config import Optimizer, TrainConfig
from rungs.model.layers import LowRankParam
from rungs.parallel.axes import BLOCKS

ADAM_RMS = 0.2
"""The root mean square of an update of AdamW in practice, to which Muon's are scaled, so that both
take one learning rate (Liu et al. 2025, section 2.2)."""
MATRIX, OTHER = "matrix", "other"


def update_rule(
    train: TrainConfig, params: nnx.State, width_multiplier: float
) -> optax.GradientTransformationExtraArgs:
    """The rule that `optimizer` in `train.json` names; in muP the directions are scaled.

    Args:
        params: those that are trained.
        width_multiplier: of muP, else 1.
    """
    match train.optimizer:
        case "adamw":
            rule = _adam(train)
        case "muon":
            muon = _muon(train, nnx.map_state(_axes_of_matrix, params))
            rules = {MATRIX: muon, OTHER: _adam(train)}
            rule = optax.partition(rules, nnx.map_state(_kind, params))
        case "lion":
            rule = optax.scale_by_lion(train.beta1, train.beta2)
        case "adafactor":
            rule = _on_matrices(_adafactor(), params)
        case "sgd":
            rule = optax.trace(train.momentum)
    if width_multiplier != 1:
        scale = functools.partial(_mup_scale, train.optimizer, width_multiplier)
        rule = optax.chain(rule, _multiplied(nnx.map_state(scale, params)))
    return optax.with_extra_args_support(rule)


def _mup_scale(
    optimizer: Optimizer, width_multiplier: float, path: tuple[object, ...], param: nnx.Variable
) -> float:
    """What muP multiplies a parameter's learning rate by (Yang et al. 2022, table 8). AdamW moves
    each weight of a kernel as far whatever the width, so that outputs move with the number of
    inputs. Muon, scaled to AdamW, moves them with its root."""
    if path[0] != BLOCKS or not param.inputs:
        return 1.0
    is_orthogonal = optimizer == "muon" and is_hidden_matrix(path, param)
    return width_multiplier ** (-0.5 if is_orthogonal else -1)


def _multiplied(factors: nnx.State) -> optax.GradientTransformation:
    def update(directions: optax.Updates, _: optax.Params | None) -> optax.Updates:
        return jax.tree.map(lambda direction, factor: direction * factor, directions, factors)

    return optax.stateless(update)


def _adam(train: TrainConfig) -> optax.GradientTransformation:
    """Adam (Kingma & Ba 2015); its weight decay makes it AdamW (Loshchilov & Hutter 2019)."""
    return optax.scale_by_adam(train.beta1, train.beta2, train.epsilon)


def _muon(train: TrainConfig, axes: Any) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024): the mean of gradients with all singular values near 1, each layer
    and expert by itself.

    Args:
        axes: of each matrix, MaskedNode in place of the other parameters.
    """

    def scaled(directions: optax.Updates, _: optax.Params | None) -> optax.Updates:
        return jax.tree.map(_as_large_as_adams, directions, axes)

    muon = contrib.scale_by_muon(beta=train.momentum, weight_dimension_numbers=axes)
    return optax.chain(muon, optax.stateless(scaled))


def _as_large_as_adams(direction: Array, axes: contrib.MuonDimensionNumbers) -> Array:
    """An orthogonal matrix has a root mean square of 1 ÷ √(its larger side)."""
    sides = (math.prod(direction.shape[axis] for axis in part) for part in axes)
    return direction * ADAM_RMS * math.sqrt(max(sides))


def _adafactor() -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018) with a learning rate from outside and no mean of gradients:
    of a matrix's squared gradients only means of rows and columns are kept, those being its two
    largest axes. Unlike there, the clipping takes all layers of a kernel together."""
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


def is_hidden_matrix(path: tuple[object, ...], param: nnx.Variable) -> bool:
    """Whether it is a kernel of a block that maps one width to another: no router, which maps to
    experts, and no low-rank addition."""
    of_block = path[0] == BLOCKS and not isinstance(param, LowRankParam)
    return of_block and param.inputs > 0 and param.axes[-1] != "experts"


def _kind(path: tuple[object, ...], param: nnx.Variable) -> str:
    return MATRIX if is_hidden_matrix(path, param) else OTHER


def _axes_of_matrix(
    path: tuple[object, ...], param: nnx.Variable
) -> contrib.MuonDimensionNumbers | optax.MaskedNode:
    """Which axes are inputs and which outputs; those before, of layers and experts, are neither."""
    if not is_hidden_matrix(path, param):
        return optax.MaskedNode()
    rank, first = param.get_value().ndim, _first_input(param)
    middle = first + param.inputs
    return contrib.MuonDimensionNumbers(tuple(range(first, middle)), tuple(range(middle, rank)))


def _first_input(param: nnx.Variable) -> int:
    """The first axis that is an input of a matrix; those before are of layers and experts."""
    is_expert = param.axes[0] == "experts"
    return param.get_value().ndim - len(param.axes) + is_expert


def _on_matrices(
    rule: optax.GradientTransformation, params: nnx.State
) -> optax.GradientTransformation:
    """A rule that looks at rows and columns: of kernels whose inputs or outputs have several axes,
    too. Its state has other shapes than the parameters, and none of the axes that they declare."""
    flat = nnx.to_flat_state(params)
    shapes = {".".join(map(str, path)): _matrix_shape(param) for path, param in flat}

    def matrices(tree: optax.Params) -> dict[str, Array]:
        leaves = jax.tree.leaves(tree)
        pairs = zip(shapes.items(), leaves, strict=True)
        return {name: leaf.reshape(shape) for (name, shape), leaf in pairs}

    def update(
        gradient: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        directions, state = rule.update(matrices(gradient), state, matrices(params))
        leaves, structure = jax.tree.flatten(gradient)
        pairs = zip(shapes, leaves, strict=True)
        whole = [directions[name].reshape(leaf.shape) for name, leaf in pairs]
        return jax.tree.unflatten(structure, whole), state

    return optax.GradientTransformation(lambda params: rule.init(matrices(params)), update)


def _matrix_shape(param: nnx.Variable) -> tuple[int, ...]:
    """Layers and experts, then all inputs, then all outputs; of what is no matrix its shape."""
    shape = param.get_value().shape
    if not param.inputs:
        return shape
    first = _first_input(param)
    middle = first + param.inputs
    return (*shape[:first], math.prod(shape[first:middle]), math.prod(shape[middle:]))

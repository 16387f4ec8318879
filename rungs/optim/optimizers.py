"""The optimizers: how each turns a gradient into a direction.

`multi_steps.py` adds clipping, weight decay and the learning rate. Here, the kind of a parameter
(matrix, router, low-rank addition) is read from the axes it declares, as in `layers.py`, and never
from its number of dimensions, because stacking layers adds one to all of them.
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
from rungs.parallel.names import BLOCKS

ADAM_RMS = 0.2
"""Typical root mean square of an AdamW update. Muon's updates are scaled to it, so that both use
the same learning rate (Liu et al. 2025, section 2.2)."""
MATRIX, OTHER = "matrix", "other"


def update_rule(
    train: TrainConfig, params: nnx.State, width_multiplier: float
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer that `train.json` names; with muP, its directions are scaled.

    Args:
        params: the trained parameters.
        width_multiplier: muP's width multiplier; 1 without muP.
    """
    match train.optimizer:
        case "adamw":
            rule = _adam(train)
        case "muon":
            muon = _muon(train, nnx.map_state(_matrix_axes, params))
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
        rule = optax.chain(rule, _multiply_by(nnx.map_state(scale, params)))
    return optax.with_extra_args_support(rule)


def _mup_scale(
    optimizer: Optimizer, width_multiplier: float, path: tuple[object, ...], param: nnx.Variable
) -> float:
    """Return the factor by which muP multiplies a parameter's learning rate (Yang et al. 2022,
    table 8).

    AdamW moves every weight of a kernel equally far at any width, so outputs move in proportion to
    the number of inputs. Muon, scaled to AdamW, moves them in proportion to its square root.
    """
    if path[0] != BLOCKS or not param.inputs:
        return 1.0
    is_orthogonal = optimizer == "muon" and is_hidden_matrix(path, param)
    return width_multiplier ** (-0.5 if is_orthogonal else -1)


def _multiply_by(factors: nnx.State) -> optax.GradientTransformation:
    def update(directions: optax.Updates, _: optax.Params | None) -> optax.Updates:
        return jax.tree.map(lambda direction, factor: direction * factor, directions, factors)

    return optax.stateless(update)


def _adam(train: TrainConfig) -> optax.GradientTransformation:
    """Adam (Kingma & Ba 2015); `MultiSteps` adds the decoupled weight decay that makes it AdamW
    (Loshchilov & Hutter 2019)."""
    return optax.scale_by_adam(train.beta1, train.beta2, train.epsilon)


def _muon(train: TrainConfig, axes: Any) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024): the momentum with all singular values near 1, orthogonalized
    separately for each layer and expert.

    Args:
        axes: the axes of each matrix; MaskedNode for the other parameters.
    """

    def scale(directions: optax.Updates, _: optax.Params | None) -> optax.Updates:
        return jax.tree.map(_scale_to_adam, directions, axes)

    muon = contrib.scale_by_muon(beta=train.momentum, weight_dimension_numbers=axes)
    return optax.chain(muon, optax.stateless(scale))


def _scale_to_adam(direction: Array, axes: contrib.MuonDimensionNumbers) -> Array:
    """Scale an orthogonal matrix, whose root mean square is 1 ÷ √(larger side), to AdamW's."""
    sides = (math.prod(direction.shape[axis] for axis in part) for part in axes)
    return direction * ADAM_RMS * math.sqrt(max(sides))


def _adafactor() -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018) without momentum and with an external learning rate.

    It keeps only the row and column means of a matrix's squared gradients, over its two largest
    axes. Unlike in the paper, all layers of a kernel are clipped together.
    """
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


def is_hidden_matrix(path: tuple[object, ...], param: nnx.Variable) -> bool:
    """Return whether a parameter is a kernel in a block that maps one width to another.

    Routers, which map to experts, and low-rank additions are not.
    """
    is_full_rank = path[0] == BLOCKS and not isinstance(param, LowRankParam)
    return is_full_rank and param.inputs > 0 and param.axes[-1] != "experts"


def _kind(path: tuple[object, ...], param: nnx.Variable) -> str:
    return MATRIX if is_hidden_matrix(path, param) else OTHER


def _matrix_axes(
    path: tuple[object, ...], param: nnx.Variable
) -> contrib.MuonDimensionNumbers | optax.MaskedNode:
    """Return which axes are inputs and which are outputs; leading layer and expert axes are
    neither."""
    if not is_hidden_matrix(path, param):
        return optax.MaskedNode()
    rank, first = param.get_value().ndim, _first_input(param)
    middle = first + param.inputs
    return contrib.MuonDimensionNumbers(tuple(range(first, middle)), tuple(range(middle, rank)))


def _first_input(param: nnx.Variable) -> int:
    """Return the index of a matrix's first input axis; layer and expert axes come before it."""
    is_expert = param.axes[0] == "experts"
    return param.get_value().ndim - len(param.axes) + is_expert


def _on_matrices(
    rule: optax.GradientTransformation, params: nnx.State
) -> optax.GradientTransformation:
    """Apply a rule that works on rows and columns to kernels with several input or output axes.

    Each kernel is reshaped to a stack of matrices. The rule's state therefore has other shapes than
    the parameters, and declares no axes.
    """
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
        reshaped = [directions[name].reshape(leaf.shape) for name, leaf in pairs]
        return jax.tree.unflatten(structure, reshaped), state

    return optax.GradientTransformation(lambda params: rule.init(matrices(params)), update)


def _matrix_shape(param: nnx.Variable) -> tuple[int, ...]:
    """Return (layers and experts…, all inputs, all outputs); other parameters keep their shape."""
    shape = param.get_value().shape
    if not param.inputs:
        return shape
    first = _first_input(param)
    middle = first + param.inputs
    return (*shape[:first], math.prod(shape[first:middle]), math.prod(shape[middle:]))

"""Find the optimizer that `train.json` names: one of `optimizers.py`, or of another package."""

import functools

import jax
import optax
from flax import nnx

from rungs.common.plugins import OPTIMIZERS, load_plugin
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import OptimizationConfig
from rungs.optim.kept_state import keeping_state
from rungs.optim.optimizers import BUILT_IN, MakeOptimizer, is_hidden_matrix
from rungs.parallel.names import BLOCKS


def update_rule(
    train: OptimizationConfig, params: nnx.State, model: ModelConfig
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer that `train.json` names, whose update takes `applied`, as in
    `kept_state.py`; with muP, its directions are scaled.

    Args:
        params: the trained parameters.
        model: for muP's width multiplier, and the size of the vocabulary without padding.
    """
    if make_built_in := BUILT_IN.get(train.optimizer):
        rule = make_built_in(train, params, model)
    else:
        make: MakeOptimizer = load_plugin(OPTIMIZERS, train.optimizer)
        rule = keeping_state(make(train, params, model))
    if model.width_multiplier != 1:
        scale = functools.partial(_mup_scale, train.optimizer, model.width_multiplier)
        rule = optax.chain(rule, _multiply_by(nnx.map_state(scale, params)))
    return optax.with_extra_args_support(rule)


def _mup_scale(
    optimizer: str, width_multiplier: float, path: tuple[object, ...], param: nnx.Variable
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

"""The optimizers: how each turns a gradient into a direction. A parameter's kind (matrix, router,
low-rank addition) follows from its declared axes, never its number of dimensions, as stacking
layers adds one to all."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from optax import contrib

from rungs.common.plugins import OPTIMIZERS, load_plugin
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import OptimizationConfig
from rungs.model.layers import LowRankParam
from rungs.parallel import sharding, target_device

ADAM_RMS = 0.2
"""Typical root mean square of an AdamW update. Muon's updates are scaled to it, so that both can
use the same learning rate (Liu et al. 2025, section 2.2)."""
NORMUON_EPSILON = 1e-8
"""Added to the roots that NorMuon divides by."""
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
"""Coefficients of x, x³ and x⁵ in each iteration, optimal for singular values from 0.001 to 1
(Amsel et al. 2025, algorithm 1)."""
POLAR_EXPRESS_SAFETY = 1.01
"""Divisor of singular values in each iteration, and in the norm before the first, so that rounding
can't push one above 1 (Amsel et al. 2025, section 4.4)."""
MATRIX, OTHER = "matrix", "other"
Tree = TypeVar("Tree")

MakeOptimizer = Callable[[OptimizationConfig, nnx.State, ModelConfig], optax.GradientTransformation]
"""Function from `train.json`, the trained parameters and `model.json` to a transformation of
gradients into directions. `SkippingOptimizer` clips the gradients first, and subtracts
learning rate × (direction + weight decay × weight). Those in `BUILT_IN` keep their state if an
update is not applied (`keeping_state`); `update_rule` adds that to others."""


def update_rule(
    train: OptimizationConfig, params: nnx.State, model: ModelConfig
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer that `train.json` names, built in or from another package, with muP's
    scaling. Its update takes `applied`, whether the directions will be used. `params` are the
    trained parameters; `model` gives muP's width multiplier and the unpadded vocabulary size."""
    if make_built_in := BUILT_IN.get(train.optimizer):
        rule = make_built_in(train, params, model)
    else:
        make: MakeOptimizer = load_plugin(OPTIMIZERS, train.optimizer)
        rule = keeping_state(make(train, params, model))
    if model.width_multiplier != 1:
        factor = functools.partial(_mup_factor, train.optimizer, model.width_multiplier)
        rule = optax.chain(rule, _multiply(nnx.map_state(factor, params)))
    return optax.with_extra_args_support(rule)


def multiply_groups(train: OptimizationConfig, params: nnx.State) -> optax.GradientTransformation:
    """Return a transformation that applies `learning_rate_multipliers` to updates."""
    if (multipliers := train.learning_rate_multipliers) is None:
        return optax.identity()
    return _multiply(nnx.map_state(lambda *param: getattr(multipliers, group_of(*param)), params))


def group_of(path: tuple[object, ...], param: nnx.Variable) -> str:
    """Return the key of `learning_rate_multipliers` that applies to a parameter."""
    if path[-1] in ("residual_scale", "embedding_skip"):
        return str(path[-1])
    if path[0] == sharding.HEAD:
        return "head"
    if path[-1] == "embedding":
        return "embedding"
    return "matrices" if param.inputs else "vectors"


def _multiply(factors: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda tree, _: jax.tree.map(jnp.multiply, tree, factors))


def _mup_factor(
    optimizer: str, width_multiplier: float, path: tuple[object, ...], param: nnx.Variable
) -> float:
    """Return muP's factor on a parameter's learning rate (Yang et al. 2022, table 8). AdamW moves
    every weight of a kernel equally far at any width, so outputs move in proportion to the number
    of inputs; with Muon, scaled to AdamW, in proportion to its square root."""
    if path[0] not in sharding.LAYERS or not param.inputs:
        return 1.0
    is_orthogonal = optimizer == "muon" and is_hidden_matrix(path, param)
    return width_multiplier ** (-0.5 if is_orthogonal else -1)


def keep_unless(applied: Array, new: Tree, old: Tree) -> Tree:
    """Return the new state if the update is applied, else the old one."""
    return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)


def keeping_state(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return a rule that keeps its state if an update is not applied."""
    rule = optax.with_extra_args_support(rule)

    def update(
        gradient: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        applied: Array,
        **arguments: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        directions, new = rule.update(gradient, state, params, applied=applied, **arguments)
        return directions, keep_unless(applied, new, state)

    return optax.GradientTransformationExtraArgs(rule.init, update)


def muon(train: OptimizationConfig, params: nnx.State, *_: Any) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the kernels of the blocks, and AdamW for everything else."""

    def kind(*param: Any) -> str:
        return MATRIX if is_hidden_matrix(*param) else _beta2_group(train, *param)

    rules = {MATRIX: _orthogonal(train, nnx.map_state(_matrix_axes, params))}
    return optax.partition(rules | _adam_rules(train), nnx.map_state(kind, params))


def lion(train: OptimizationConfig, *_: Any) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023)."""
    return keeping_state(optax.scale_by_lion(train.beta1, train.beta2))


def adafactor(
    _: OptimizationConfig, params: nnx.State, model: ModelConfig
) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018) without momentum, with an external learning rate. It keeps
    only the row and column means of a matrix's squared gradients, over its two largest axes. Unlike
    in the paper, all layers of a kernel are clipped together."""
    rule = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    return keeping_state(_on_matrices(rule, params, model.vocab_size))


def sgd(train: OptimizationConfig, *_: Any) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum."""
    return keeping_state(optax.trace(train.momentum))


def adamw(train: OptimizationConfig, params: nnx.State, *_: Any) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019), with the groups' own values of beta2, if there are any."""
    rules = _adam_rules(train)
    groups = nnx.map_state(functools.partial(_beta2_group, train), params)
    return optax.partition(rules, groups) if train.group_beta2 else rules[OTHER]


def _beta2_group(train: OptimizationConfig, path: tuple[object, ...], param: nnx.Variable) -> str:
    """Return the group of a parameter if it has a beta2 of its own."""
    group = group_of(path, param)
    return group if group in train.group_beta2 else OTHER


def _adam_rules(train: OptimizationConfig) -> dict[str, optax.GradientTransformation]:
    """Return the rule of each group with a beta2 of its own, and of the others."""
    beta2s = [(OTHER, train.beta2), *train.group_beta2.items()]
    return {group: _adam(train, beta2) for group, beta2 in beta2s}


def _adam(train: OptimizationConfig, beta2: float) -> optax.GradientTransformation:
    """Adam (Kingma & Ba 2015, algorithm 1), like `optax.scale_by_adam`; `SkippingOptimizer` adds
    the decoupled weight decay that makes it AdamW (Loshchilov & Hutter 2019). There is a barrier
    between moments and directions. Without it XLA's CPU compiler computes the new moments twice,
    for themselves and for the weights, and copies the old ones, which it would otherwise overwrite
    too early: 15 passes over arrays of the parameters' size instead of 10."""
    adam = optax.scale_by_adam(train.beta1, beta2, train.epsilon)

    def update(
        gradient: optax.Updates,
        state: optax.ScaleByAdamState,
        params: optax.Params | None = None,
        *,
        applied: Array,
        **_: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        _, new = adam.update(gradient, state, params)
        kept = target_device.cpu_barrier(keep_unless(applied, new, state))
        means = optax.tree.bias_correction(kept.mu, train.beta1, new.count)
        squares = optax.tree.bias_correction(kept.nu, beta2, new.count)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + train.epsilon), means, squares)
        return scaled, kept

    return optax.GradientTransformationExtraArgs(adam.init, update)


BUILT_IN: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "muon": muon,
    "lion": lion,
    "adafactor": adafactor,
    "sgd": sgd,
}


def _orthogonal(train: OptimizationConfig, axes: Any) -> optax.GradientTransformation:
    """Muon's direction: the momentum with all singular values near 1, orthogonalized per layer and
    expert. `axes` are those of each matrix; MaskedNode for other parameters."""

    def scale(directions: optax.Updates, _: optax.Params | None) -> optax.Updates:
        return jax.tree.map(_scale_to_adam, directions, axes)

    polynomials = (
        {"ns_coeffs": _polar_express()} if train.orthogonalization == "polar_express" else {}
    )
    make: Any = functools.partial(
        contrib.scale_by_muon, weight_dimension_numbers=axes, **polynomials
    )
    momentum: Any = train.momentum
    if steps := train.momentum_warmup_steps:
        momentum = optax.linear_schedule(train.start_momentum, train.momentum, steps)
        make = optax.inject_hyperparams(make, static_args=("ns_steps", "eps"))
    rule = make(beta=momentum)
    if train.normuon_beta2 is not None:
        return keeping_state(optax.chain(rule, _normalize_outputs(train.normuon_beta2, axes)))
    return keeping_state(optax.chain(rule, optax.stateless(scale)))


def _polar_express() -> tuple[tuple[float, float, float], ...]:
    """Return the coefficients with their safety margin; the first includes the initial norm's."""
    margins = POLAR_EXPRESS_SAFETY**2, *(POLAR_EXPRESS_SAFETY,) * (len(POLAR_EXPRESS) - 1)
    return tuple(
        (a / margin, b / margin**3, c / margin**5)
        for (a, b, c), margin in zip(POLAR_EXPRESS, margins, strict=True)
    )


def _normalize_outputs(beta2: float, axes: Any) -> optax.GradientTransformation:
    """NorMuon (Li et al. 2025, algorithm 1): divides each output of a matrix by the root of a
    running mean of its squares, then scales the matrix to AdamW's root mean square. A mean has its
    matrix's axes, with inputs of size 1."""

    def squares(direction: Array, of: contrib.MuonDimensionNumbers) -> Array:
        return jnp.square(direction).mean(of.reduction_axis, keepdims=True)

    def normalize(direction: Array, square: Array, of: contrib.MuonDimensionNumbers) -> Array:
        scaled = direction / (jnp.sqrt(square) + NORMUON_EPSILON)
        matrix = *of.reduction_axis, *of.output_axis
        size = jnp.sqrt(jnp.square(scaled).mean(matrix, keepdims=True))
        return ADAM_RMS * scaled / (size + NORMUON_EPSILON)

    def init(params: optax.Params) -> optax.OptState:
        def zeros(param: Any, of: contrib.MuonDimensionNumbers) -> Any:
            return jax.tree.map(lambda array: jnp.zeros_like(squares(array, of)), param)

        return jax.tree.map(zeros, params, axes, is_leaf=lambda it: isinstance(it, nnx.Variable))

    def update(
        directions: optax.Updates, state: optax.OptState, _: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        own = jax.tree.map(squares, directions, axes)
        means = jax.tree.map(lambda v, s: beta2 * v + (1 - beta2) * s, state, own)
        return jax.tree.map(normalize, directions, means, axes), means

    return optax.GradientTransformation(init, update)


def _scale_to_adam(direction: Array, axes: contrib.MuonDimensionNumbers) -> Array:
    """Return an orthogonal matrix, with root mean square 1 ÷ √(larger side), scaled to AdamW's."""
    sides = (math.prod(direction.shape[axis] for axis in part) for part in axes)
    return direction * ADAM_RMS * math.sqrt(max(sides))


def is_hidden_matrix(path: tuple[object, ...], param: nnx.Variable) -> bool:
    """Return whether a parameter is a block's kernel from one width to another; routers, which map
    to experts, and low-rank additions are not."""
    is_full_rank = path[0] in sharding.LAYERS and not isinstance(param, LowRankParam)
    return is_full_rank and param.inputs > 0 and param.axes[-1] != "experts"


def _matrix_axes(
    path: tuple[object, ...], param: nnx.Variable
) -> contrib.MuonDimensionNumbers | optax.MaskedNode:
    """Return which axes are inputs and which outputs; leading layer and expert axes are neither."""
    if not is_hidden_matrix(path, param):
        return optax.MaskedNode()
    rank, first = param.get_value().ndim, _first_input(param)
    middle = first + param.inputs
    return contrib.MuonDimensionNumbers(tuple(range(first, middle)), tuple(range(middle, rank)))


def _first_input(param: nnx.Variable) -> int:
    """Return the index of a matrix's first input axis; layer and expert axes come before it."""
    is_expert = param.axes[0] == "experts"
    return param.get_value().ndim - len(param.axes) + is_expert


class _Matrix(NamedTuple):
    """A parameter viewed as a stack of matrices, for a factored rule."""

    param: nnx.Variable
    vocab_size: int

    @property
    def _own_shape(self) -> tuple[int, ...]:
        """The parameter's shape without vocabulary padding."""
        shape = list(self.param.get_value().shape)
        if (axis := sharding.padded_axis(self.param)) is not None:
            shape[axis] = self.vocab_size
        return tuple(shape)

    @property
    def _stacked_shape(self) -> tuple[int, ...]:
        """(layers and experts…, all inputs, all outputs); for vectors, their own shape."""
        shape = self._own_shape
        if not self.param.inputs:
            return shape
        first = _first_input(self.param)
        middle = first + self.param.inputs
        return (*shape[:first], math.prod(shape[first:middle]), math.prod(shape[middle:]))

    def of(self, array: Array) -> Array:
        """Return an array of the parameter's shape as a stack of matrices."""
        own = jax.lax.slice(array, (0,) * array.ndim, self._own_shape)
        return own.reshape(self._stacked_shape)

    def back(self, matrices: Array) -> Array:
        """Return a stack of matrices in the parameter's shape, with zeros as padding."""
        sizes = zip(self.param.get_value().shape, self._own_shape, strict=True)
        own = matrices.reshape(self._own_shape)
        return jnp.pad(own, [(0, size - without) for size, without in sizes])


def _on_matrices(
    rule: optax.GradientTransformation, params: nnx.State, vocab_size: int
) -> optax.GradientTransformation:
    """Apply a row-and-column rule to kernels with several input or output axes. The rule sees each
    kernel as a stack of matrices without vocabulary padding, which would distort its means. So its
    state has other shapes than the parameters, the same on every mesh, and declares no axes."""
    flat = nnx.to_flat_state(params)
    views = {sharding.dotted(path): _Matrix(param, vocab_size) for path, param in flat}

    def matrices(tree: optax.Params) -> dict[str, Array]:
        pairs = zip(views.items(), jax.tree.leaves(tree), strict=True)
        return {name: view.of(leaf) for (name, view), leaf in pairs}

    def update(
        gradient: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        directions, state = rule.update(matrices(gradient), state, matrices(params))
        leaves = [view.back(directions[name]) for name, view in views.items()]
        return jax.tree.unflatten(jax.tree.structure(gradient), leaves), state

    return optax.GradientTransformation(lambda params: rule.init(matrices(params)), update)

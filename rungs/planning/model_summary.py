"""Modules and arrays of a model, and how each sharding mode splits them, as text and as JSON."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
from flax import nnx

from rungs.common.shown_text import align_columns
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import LoraConfig
from rungs.config.sharding_config import Mode, ShardingConfig, mesh_axes
from rungs.parallel.sharding import MESH_AXES, as_tuple, dotted
from rungs.planning.communication import abstract_layout, padded_shape
from rungs.step.state import abstract_model, build_model

LAYERS = "layers"
"""Name of the leading axis along which the blocks are stacked."""


@dataclasses.dataclass(frozen=True)
class ModuleSummary:
    """One module of the tree."""

    path: str
    """Dotted path; empty for the model itself."""
    type: str
    parameters: int


@dataclasses.dataclass(frozen=True)
class ArraySummary:
    """One parameter."""

    name: str
    axes: list[str]
    shape: list[int]
    dtype: str
    initial_std: float | None
    """Standard deviation of the initial values; None if not computed."""
    share: float
    """Share of all parameters, between 0 and 1."""
    splits: dict[str, dict[str, str]]
    """Mesh axis that splits an array axis, by sharding mode and array axis."""


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    parameters: int
    modules: list[ModuleSummary]
    arrays: list[ArraySummary]


def summarize(
    config: ModelConfig,
    lora: LoraConfig | None,
    mesh_shape: dict[str, int],
    *,
    seed: int,
    max_initialized: int,
) -> ModelSummary:
    """Describe the model that a run builds, with adapters if `lora` is given. `mesh_shape` has the
    devices along each mesh axis, at least 2, for modes that use it. `seed` is for the initial
    values, whose standard deviations are omitted above `max_initialized` parameters."""
    model = abstract_model(config, lora)
    flat = nnx.to_flat_state(nnx.state(model))
    total = sum(variable.get_value().size for _, variable in flat)
    stds = _initial_stds(config, lora, seed) if total <= max_initialized else {}
    arrays = [
        ArraySummary(
            name=dotted(path),
            axes=_axes(variable),
            shape=list(variable.get_value().shape),
            dtype=str(variable.get_value().dtype),
            initial_std=stds.get(dotted(path)),
            share=variable.get_value().size / total,
            splits={mode: _splits(mode, mesh_shape, variable) for mode in MESH_AXES},
        )
        for path, variable in flat
    ]
    modules = _modules_of(config, lora)
    paths = [module.path for module in modules]
    arrays.sort(key=lambda array: paths.index(array.name.rpartition(".")[0]))
    return ModelSummary(total, modules, arrays)


def _axes(variable: nnx.Variable) -> list[str]:
    names = list(variable.get_metadata()["axes"])
    return [LAYERS] * (variable.get_value().ndim - len(names)) + names


def _splits(mode: Mode, mesh_shape: dict[str, int], variable: nnx.Variable) -> dict[str, str]:
    used = set(itertools.chain(*map(as_tuple, MESH_AXES[mode].values())))
    first, last = (mesh_shape[axis] if axis in used else 1 for axis in mesh_axes(mode))
    layout = abstract_layout(ShardingConfig.of(mode, (first, last)))
    spec = layout.spec(variable.get_metadata()["axes"], padded_shape(variable, layout))
    axes = zip(_axes(variable), spec, strict=False)
    return {axis: " × ".join(as_tuple(over)) for axis, over in axes if over is not None}


def _modules_of(config: ModelConfig, lora: LoraConfig | None) -> list[ModuleSummary]:
    """Return a model's modules, listed while it is built, because `abstract_model` loses the order
    of definition of the outermost."""
    found: list[ModuleSummary] = []
    jax.eval_shape(lambda: found.extend(_modules(build_model(config, lora, jax.random.key(0)))))
    return found


def _modules(module: nnx.Module, path: str = "") -> list[ModuleSummary]:
    count = sum(value.size for value in jax.tree.leaves(nnx.state(module, nnx.Param)))
    found = [ModuleSummary(path, type(module).__name__, count)]
    for name, part in vars(module).items():
        if isinstance(part, nnx.Module):
            found += _modules(part, f"{path}.{name}" if path else name)
    return found


def _initial_stds(config: ModelConfig, lora: LoraConfig | None, seed: int) -> dict[str, float]:
    def stds() -> dict[str, jax.Array]:
        flat = nnx.to_flat_state(nnx.state(build_model(config, lora, jax.random.key(seed))))
        return {dotted(path): jnp.std(variable.get_value()) for path, variable in flat}

    return {name: float(std) for name, std in jax.jit(stds)().items()}


def as_json(summary: ModelSummary) -> str:
    """Return all modules and arrays as JSON."""
    return json.dumps(dataclasses.asdict(summary), indent=2)


def as_text(summary: ModelSummary) -> str:
    """Return the tree of modules, and a table of the arrays."""
    header = ("array", "axes", "shape", "dtype", "initial std", "share", *summary.arrays[0].splits)
    table = align_columns([header, *map(_row, summary.arrays)], left=4)
    return f"{_tree(summary)}\n\n{table}"


def _tree(summary: ModelSummary) -> str:
    rows = []
    for module in summary.modules:
        depth = module.path.count(".") + 1 if module.path else 0
        name = module.path.rpartition(".")[2]
        label = f"{'  ' * depth}{name}: {module.type}" if name else module.type
        rows.append((label, f"{module.parameters:,}"))
    return align_columns([("module", "parameters"), *rows])


def _row(array: ArraySummary) -> tuple[str, ...]:
    splits = [
        ", ".join(f"{axis} / {over}" for axis, over in by_axis.items())
        for by_axis in array.splits.values()
    ]
    return (
        array.name,
        " ".join(array.axes),
        " × ".join(f"{size:,}" for size in array.shape),
        array.dtype,
        "too large" if array.initial_std is None else f"{array.initial_std:.4g}",
        f"{array.share:.2%}",
        *(split or "–" for split in splits),
    )

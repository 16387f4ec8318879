"""save_checkpoint and load_checkpoint."""

import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
from flax import nnx


class Net(nnx.Module):
    def __init__(self, width: int = 5, seed: int = 0) -> None:
        self.width, self.name = width, "net"
        self.layers = nnx.List(
            [nnx.Linear(3, width, rngs=nnx.Rngs(seed)), nnx.Linear(width, 2, rngs=nnx.Rngs(seed))]
        )
        self.table = nnx.Cache(jnp.ones(7))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def make(seed: int = 0, width: int = 5) -> tuple[Net, nnx.Optimizer]:
    model = Net(width, seed)
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def take_step(model: Net, optimizer: nnx.Optimizer, x: jax.Array) -> None:
    gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, gradients)


def train(model: Net, optimizer: nnx.Optimizer, steps: range) -> None:
    for step in steps:
        take_step(model, optimizer, jnp.full((2, 3), step / 10))


def values(*modules: Any) -> dict[str, np.ndarray]:
    return {
        f"{number}.{'.'.join(map(str, path))}": np.asarray(variable.get_value())
        for number, module in enumerate(modules)
        for path, variable in nnx.to_flat_state(nnx.state(module))
    }


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Check variables of a model, "0.PATH", and of its optimizer, "1.PATH"."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        of = "the optimizer's" if name.startswith("1.") else "the model's"
        assert found[name].dtype == value.dtype, (
            f"{of} {name[2:]} was {value.dtype}, and came back as {found[name].dtype}"
        )
        why = f"{of} {name[2:]} is another: all variables of both are in a checkpoint"
        np.testing.assert_array_equal(found[name], value, err_msg=why)


def test_checkpoint_restores_model_and_optimizer(code: ModuleType, tmp_path: Path) -> None:
    old = make()
    train(*old, range(3))
    code.save_checkpoint(*old, 3, tmp_path / "checkpoint.safetensors")
    files = [path.name for path in tmp_path.iterdir()]
    assert files == ["checkpoint.safetensors"], (
        f"the folder has {files}: a checkpoint is one file, of just the name that was given"
    )
    new = make(seed=1)
    assert code.load_checkpoint(tmp_path / "checkpoint.safetensors", *new) == 3
    assert_equal(values(*new), values(*old))


def test_checkpoint_makes_no_difference_to_training(code: ModuleType, tmp_path: Path) -> None:
    whole, first, second = make(), make(), make(seed=1)
    train(*whole, range(6))
    train(*first, range(3))
    code.save_checkpoint(*first, 3, str(tmp_path / "checkpoint"))
    train(*second, range(code.load_checkpoint(str(tmp_path / "checkpoint"), *second), 6))
    assert_equal(values(*second), values(*whole))


def test_checkpoint_can_be_an_open_file(code: ModuleType) -> None:
    old, new, file = make(), make(seed=1), io.BytesIO()
    train(*old, range(2))
    code.save_checkpoint(*old, 2, file)
    file.seek(0)
    assert code.load_checkpoint(file, *new) == 2
    assert_equal(values(*new), values(*old))


def test_checkpoint_keeps_16_bits(code: ModuleType, tmp_path: Path) -> None:
    old, new = make(), make(seed=1)
    for model, optimizer in (old, new):
        halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param))
        nnx.update(model, halved)
        optimizer.opt_state = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param).opt_state
    code.save_checkpoint(*old, 0, tmp_path / "checkpoint")
    code.load_checkpoint(tmp_path / "checkpoint", *new)
    assert values(*new)["0.layers.0.kernel"].dtype == jnp.bfloat16
    assert_equal(values(*new), values(*old))


def test_checkpoint_is_a_file_that_others_read(code: ModuleType, tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(4))
    code.save_checkpoint(model, optimizer, 4, tmp_path / "checkpoint")
    with safetensors.safe_open(tmp_path / "checkpoint", framework="numpy") as file:
        names = set(file.keys())
        kernel = file.get_tensor("model.layers.0.kernel")
        iteration, step = file.get_tensor("iteration"), file.get_tensor("optimizer.step")
        config = json.loads(file.metadata()["config"])
    np.testing.assert_array_equal(kernel, model.layers[0].kernel.get_value())
    assert (iteration, iteration.dtype, step) == (4, np.int64, 4)
    assert config == {"width": 5, "name": "net"}, (
        f"config is {config}: the model's attributes that are numbers or text, and no others"
    )
    parameters = {f"model.layers.{n}.{kind}" for n in (0, 1) for kind in ("kernel", "bias")}
    others = {name for name in names if not name.startswith("optimizer.")}
    assert "model.table" not in others, "caches, nnx.Cache, are not in a checkpoint"
    assert others == {*parameters, "iteration"}


def test_checkpoint_of_another_model_changes_nothing(code: ModuleType, tmp_path: Path) -> None:
    code.save_checkpoint(*make(width=6), 1, tmp_path / "checkpoint")
    new = make()
    before = values(*new)
    with pytest.raises(ValueError, match="layers"):
        code.load_checkpoint(tmp_path / "checkpoint", *new)
    changed = [name for name, value in values(*new).items() if (value != before[name]).any()]
    assert not changed, f"{changed[0]} was changed: check all shapes before you change any variable"


def test_checkpoint_is_replaced_only_by_a_complete_one(
    code: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make()
    code.save_checkpoint(*old, 1, tmp_path / "checkpoint")

    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full_disk)
    monkeypatch.setattr("os.replace", full_disk)
    monkeypatch.setattr("os.rename", full_disk)
    with pytest.raises(OSError, match="no space"):
        code.save_checkpoint(*make(seed=1), 2, tmp_path / "checkpoint")
    assert code.load_checkpoint(tmp_path / "checkpoint", *make()) == 1, (
        "the old checkpoint is gone before the new one is complete: write another file, then"
        " replace"
    )


def test_checkpoint_comes_back_to_the_same_devices(code: ModuleType, tmp_path: Path) -> None:
    old, new = make(), make(seed=1)
    auto = (jax.sharding.AxisType.Auto,)
    sharding = jax.NamedSharding(jax.make_mesh((8,), ("data",), auto), jax.P())
    nnx.update(new[0], jax.device_put(nnx.state(new[0]), sharding))
    code.save_checkpoint(*old, 1, tmp_path / "checkpoint")
    code.load_checkpoint(tmp_path / "checkpoint", *new)
    devices = len(new[0].layers[0].kernel.get_value().addressable_shards)
    assert devices == 8, (
        f"a weight that was on 8 devices is on {devices}: jax.device_put it with the sharding of"
        " the"
        " one that it replaces"
    )

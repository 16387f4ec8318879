"""Each optimizer against its formula in float64 NumPy, one layer and one matrix at a time."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig, conflicts
from rungs.config.sharding_config import ShardingConfig
from rungs.model.gpt import GPT
from rungs.optim.optimizers import ADAM_RMS, _polar_express, is_hidden_matrix
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import one_device
from rungs.step.state import create_model_and_optimizer, named_arrays
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.long import long_except

STEPS = 3
RATE, BETA1, BETA2, EPSILON, MOMENTUM = 0.01, 0.8, 0.9, 1e-8, 0.7
CONFIG: dict[str, Any] = {
    "learning_rate": RATE,
    "beta1": BETA1,
    "beta2": BETA2,
    "epsilon": EPSILON,
    "momentum": MOMENTUM,
    "schedule": "constant",
    "warmup_period_percent": 0,
    "weight_decay": 0,
}
INPUTS = {"output.kernel": 2}
"""How many axes of a kernel are its inputs, where it is not one."""


def fresh(
    optimizer: str, model: ModelConfig | None = None, mesh: Mesh | None = None, **changes: Any
) -> tuple[GPT, SkippingOptimizer]:
    train = train_config(optimizer=optimizer, **{**CONFIG, **changes})
    run = RunConfig(model or model_config(), train)
    return create_model_and_optimizer(run, 20, mesh or one_device())


@nnx.jit
def update(
    model: GPT, optimizer: SkippingOptimizer, gradient: nnx.State, weight: float = 1.0
) -> None:
    optimizer.update(model, gradient, jnp.asarray(weight))


def gradients(model: GPT) -> list[nnx.State]:
    """One for each step, some elements large."""
    params = nnx.state(model, nnx.Param)
    leaves, structure = jax.tree.flatten(params)
    generator = np.random.default_rng(7)
    draws = [
        [generator.standard_t(3, leaf.shape).astype(np.float32) for leaf in leaves]
        for _ in range(STEPS)
    ]
    return [jax.tree.unflatten(structure, draw) for draw in draws]


def arrays(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.array(array, np.float64) for name, array in named_arrays(tree).items()}


def named(gradient: nnx.State) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(gradient)
    return {".".join(map(str, p)): np.array(v.get_value(), np.float64) for p, v in flat}


class Trained(NamedTuple):
    """A model's arrays before and after the steps, and the gradient of each."""

    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    steps: list[dict[str, np.ndarray]]
    optimizer: dict[str, np.ndarray]


def trained(optimizer: str, **changes: Any) -> Trained:
    model, wrapped = fresh(optimizer, **changes)
    before, steps = arrays(model), gradients(model)
    for gradient in steps:
        update(model, wrapped, gradient)
    return Trained(before, arrays(model), [*map(named, steps)], arrays(wrapped))


def adam(steps: list[np.ndarray], beta2: float = BETA2) -> np.ndarray:
    mean = square = total = np.zeros_like(steps[0])
    for count, gradient in enumerate(steps, 1):
        mean = BETA1 * mean + (1 - BETA1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        root = np.sqrt(square / (1 - beta2**count))
        total = total + mean / (1 - BETA1**count) / (root + EPSILON)
    return total


def lion(steps: list[np.ndarray]) -> np.ndarray:
    mean = total = np.zeros_like(steps[0])
    for gradient in steps:
        total = total + np.sign(BETA1 * mean + (1 - BETA1) * gradient)
        mean = BETA2 * mean + (1 - BETA2) * gradient
    return total


def sgd(steps: list[np.ndarray]) -> np.ndarray:
    velocity = total = np.zeros_like(steps[0])
    for gradient in steps:
        velocity = MOMENTUM * velocity + gradient
        total = total + velocity
    return total


def best_quintic(low: float, high: float) -> tuple[float, float, float]:
    """Coefficients of the odd polynomial of degree 5 that is nearest to 1 between two numbers, by
    Remez exchange: its error has the same size and alternates in sign at four points."""
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    for _ in range(30):
        points = np.array([low, *inner, high])
        rows = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        a, b, c, _ = np.linalg.solve(rows, np.ones(4))
        root = np.sqrt(9 * b**2 - 20 * a * c)
        inner = [float(np.sqrt((-3 * b + sign * root) / (10 * c))) for sign in (-1, 1)]
    return float(a), float(b), float(c)


def polar_express(count: int) -> list[tuple[float, float, float]]:
    """Amsel et al. 2025, algorithm 1 and section 4.4: each polynomial is the best for what those
    before it make of the singular values, and divides by 1.01; so does the norm before the first.
    Below a share of the largest value a polynomial isn't adapted."""
    low, high, found = 1e-3, 1.0, []
    for number in range(count):
        a, b, c = best_quintic(max(low, 0.02407327424182761 * high), high)
        ends = [a * x + b * x**3 + c * x**5 for x in (low, high)]
        a, b, c = (2 / sum(ends) * one for one in (a, b, c))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
        margin = 1.01 ** (2 if number == 0 else 1)
        found.append((a / margin, b / margin**3, c / margin**5))
    return found


NEWTON_SCHULZ = [(3.4445, -4.775, 2.0315)] * 5
POLYNOMIALS = {"newton_schulz": NEWTON_SCHULZ, "polar_express": polar_express(5)}


def muon(
    steps: list[np.ndarray],
    orthogonalization: str = "newton_schulz",
    normuon_beta2: float | None = None,
    momentum_warmup_steps: int = 1,
    start_momentum: float = MOMENTUM,
) -> np.ndarray:
    """Of one matrix, (in, out), by the singular values: each goes through five quintics, after
    division by the matrix's norm. NorMuon: Li et al. 2025, algorithm 1."""
    mean, total = np.zeros_like(steps[0]), np.zeros_like(steps[0])
    squares = np.zeros(steps[0].shape[1])
    for count, gradient in enumerate(steps, 1):
        risen = min((count - 1) / momentum_warmup_steps, 1)
        momentum = (1 - risen) * start_momentum + risen * MOMENTUM
        mean = momentum * mean + (1 - momentum) * gradient
        ahead = momentum * mean / (1 - momentum ** (count + 1))
        ahead += (1 - momentum) * gradient / (1 - momentum**count)
        left, values, right = np.linalg.svd(ahead, full_matrices=False)
        values = values / np.linalg.norm(values)
        for a, b, c in POLYNOMIALS[orthogonalization]:
            values = a * values + b * values**3 + c * values**5
        orthogonal = (left * values) @ right
        if normuon_beta2 is None:
            total += ADAM_RMS * np.sqrt(max(gradient.shape)) * orthogonal
        else:
            squares = normuon_beta2 * squares
            squares += (1 - normuon_beta2) * (orthogonal**2).mean(axis=0)
            scaled = orthogonal / np.sqrt(squares)
            total += ADAM_RMS * np.sqrt(gradient.size) * scaled / np.linalg.norm(scaled)
    return total


def adafactor(steps: list[np.ndarray]) -> np.ndarray:
    """Of a stack of matrices, (layers, in, out), with row and column means of the squares."""
    rows, columns = 0.0, 0.0
    total = np.zeros_like(steps[0])
    for count, gradient in enumerate(steps, 1):
        decay = 1 - count**-0.8
        square = gradient**2 + 1e-30
        rows = decay * rows + (1 - decay) * square.mean(axis=-1, keepdims=True)
        columns = decay * columns + (1 - decay) * square.mean(axis=-2, keepdims=True)
        direction = gradient / np.sqrt(rows * columns / np.mean(rows, axis=-2, keepdims=True))
        total += direction / max(1.0, np.sqrt(np.mean(direction**2)))
    return total


def assert_moved(before: np.ndarray, after: np.ndarray, total: np.ndarray, name: str) -> None:
    """By −learning rate × total; weights near 1 lose digits where the update is small."""
    np.testing.assert_allclose(after - before, -RATE * total, rtol=2e-3, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("adamw", adam),
        pytest.param("lion", lion, marks=pytest.mark.long),
        pytest.param("sgd", sgd, marks=pytest.mark.long),
    ],
)
def test_every_parameter_moves_by_the_formula(name: str, rule: Any) -> None:
    before, after, steps, _ = trained(name)
    assert before.keys() == steps[0].keys()
    for parameter in before:
        total = rule([step[parameter] for step in steps])
        assert_moved(before[parameter], after[parameter], total, parameter)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_groups_have_their_own_beta2(optimizer: str) -> None:
    before, after, steps, _ = trained(optimizer, group_beta2={"head": 0.5, "vectors": 0.99})
    for name in before:
        if name.startswith("blocks") and name.endswith("kernel") and optimizer == "muon":
            continue
        is_vector = not name.endswith(("kernel", "embedding"))
        beta2 = 0.5 if name.startswith("head") else 0.99 if is_vector else BETA2
        assert_moved(before[name], after[name], adam([step[name] for step in steps], beta2), name)


MIXTRAL = {"n_experts": 3, "experts_per_token": 2, "feed_forward": "swiglu", "ffn_bias": False}


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        pytest.param(MIXTRAL, {}, id="experts", marks=pytest.mark.long),
        pytest.param({}, {"orthogonalization": "polar_express", "normuon_beta2": 0.6}, id="both"),
        pytest.param({}, {"momentum_warmup_steps": 2, "start_momentum": 0.1}, id="warm-up"),
    ],
)
def test_muon_makes_each_layers_and_experts_kernel_orthogonal(
    changes: dict[str, Any], keys: dict[str, Any]
) -> None:
    before, after, steps, _ = trained("muon", model=model_config(**changes), **keys)
    matrices = 0
    for name in before:
        parts = [step[name] for step in steps]
        if not (name.startswith("blocks") and name.endswith("kernel")) or "router" in name:
            assert_moved(before[name], after[name], adam(parts), name)
            continue
        inputs = next((n for end, n in INPUTS.items() if name.endswith(end)), 1)
        stack = 2 if "feed_forward" in name and changes else 1
        shape = before[name].shape
        into = int(np.prod(shape[stack : stack + inputs]))
        flat = (-1, into, int(np.prod(shape[stack + inputs :])))
        moved = (after[name] - before[name]).reshape(flat)
        for layer, found in enumerate(moved):
            total = muon([part.reshape(flat)[layer] for part in parts], **keys)
            assert_moved(np.zeros_like(found), found, total, name)
            matrices += 1
    assert matrices == 2 * (4 + (9 if changes else 2))


def test_polar_express_has_better_polynomials_for_each_iteration() -> None:
    np.testing.assert_allclose(_polar_express(), polar_express(5), rtol=1e-9)


def test_normuon_keeps_a_mean_for_each_output_and_survives_a_gradient_of_zeros() -> None:
    """Where a projection into the residual stream is zero, what is before it has no gradient."""
    model, optimizer = fresh("muon", normuon_beta2=0.9)
    gradient = gradients(model)[0]
    for each in (jax.tree.map(jnp.zeros_like, gradient), gradient):
        update(model, optimizer, each)
    assert all(np.isfinite(array).all() for array in arrays(model).values())
    shapes = {name: array.shape for name, array in arrays(optimizer).items()}
    weight = model.blocks.attention.query.kernel[...].shape  # type: ignore[union-attr]
    kept = [s for name, s in shapes.items() if name.endswith("attention.query.kernel")]
    assert sorted(kept) == sorted([weight, (weight[0], 1, *weight[2:])])


@pytest.mark.long
def test_adafactor_keeps_rows_and_columns_of_matrices_of_a_hundred_and_more() -> None:
    config = model_config(emb_dim=128, n_heads=2, vocab_size=130)
    before, after, steps, optimizer = trained("adafactor", model=config)
    for name in ("query", "output"):
        whole = f"blocks.attention.{name}.kernel"
        parts = [step[whole].reshape(2, 128, 128) for step in steps]
        moved = (after[whole] - before[whole]).reshape(2, 128, 128)
        assert_moved(np.zeros_like(moved), moved, adafactor(parts), name)
    held = sum(array.size for array in optimizer.values())
    assert held < 0.1 * sum(array.size for array in before.values())


@pytest.mark.long
@pytest.mark.parametrize("name", ["adafactor", "normuon"])
def test_sharded_as_on_one_device(name: str) -> None:
    outcomes = []
    keys: dict[str, Any] = {"normuon_beta2": 0.9} if name == "normuon" else {}
    name = name.removeprefix("nor")
    for devices in (1, 2):
        changes = keys | ({"sharding": ShardingConfig(mode="fsdp")} if devices > 1 else {})
        outcomes.append(trained(name, mesh=mesh_of(devices), **changes).after)
    one, two = outcomes
    for parameter, array in one.items():
        np.testing.assert_allclose(two[parameter], array, atol=1e-6, err_msg=parameter)


@pytest.mark.parametrize("name", long_except({"adafactor"}, ["adafactor", "muon"]))
def test_padding_of_the_vocabulary_changes_no_update(name: str) -> None:
    """129 rows are split over two devices as 65 each, the last one padding; Adafactor factors the
    second moments of matrices of 128 and more."""
    config = model_config(vocab_size=129, emb_dim=128, n_layers=0, n_heads=None)
    sharding = ShardingConfig(mode="tp", tensor=2)
    model, optimizer = fresh(name, config)
    padded, padded_optimizer = fresh(name, config, mesh_of(1, 2), sharding=sharding)
    assert named_arrays(padded)["head.kernel"].shape == (128, 130)
    for gradient in gradients(model):
        update(model, optimizer, gradient)
        update(padded, padded_optimizer, _padded(gradient, padded))
    expected, found = (named_arrays(module, 129) for module in (model, padded))
    for parameter, array in expected.items():
        np.testing.assert_allclose(found[parameter], array, atol=1e-6, err_msg=parameter)
    shapes, padded_shapes = (
        {path: array.shape for path, array in named_arrays(state, 129).items()}
        for state in (optimizer, padded_optimizer)
    )
    assert shapes == padded_shapes


def _padded(gradient: nnx.State, model: GPT) -> nnx.State:
    """The gradient with zeros for the padding that a model has."""

    def pad(array: jax.Array, like: jax.Array) -> np.ndarray:
        widths = [(0, size - own) for size, own in zip(like.shape, array.shape, strict=True)]
        return np.pad(array, widths)

    return jax.tree.map(pad, gradient, nnx.state(model, nnx.Param))


@pytest.mark.parametrize("name", long_except({"muon"}, ["muon", "adamw", "adafactor"]))
def test_without_a_finite_microbatch_nothing_moves(name: str) -> None:
    """Only the count of steps changes in a step without a finite microbatch."""
    of_muon: dict[str, Any] = {"momentum_warmup_steps": 5, "group_beta2": {"head": 0.5}}
    model, optimizer = fresh(name, **(of_muon if name == "muon" else {}))
    first, second, _ = gradients(model)
    update(model, optimizer, first)
    before = arrays(model) | arrays(optimizer)
    update(model, optimizer, second, 0.0)
    after = arrays(model) | arrays(optimizer)
    assert after.pop("step") == before.pop("step") + 1
    assert all((after[part] == before[part]).all() for part in before)


@pytest.mark.long
def test_hidden_matrices_are_the_kernels_of_attention_and_experts() -> None:
    config = model_config(**MIXTRAL)
    model, _ = create_model_and_optimizer(RunConfig(config, train_config()), 1, one_device())
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    hidden = {".".join(map(str, path)) for path, p in flat if is_hidden_matrix(path, p)}
    assert hidden == {
        *(f"blocks.attention.{part}.kernel" for part in ("query", "key", "value", "output")),
        *(f"blocks.feed_forward.{part}.kernel" for part in ("gate", "up", "down")),
    }


# Optimizers of other packages, found by their entry points

MODULE = """
import optax

def ours(train, params, model):
    return optax.scale_by_adam(train.beta1, train.beta2, train.epsilon)

def backwards(train, params, model):
    return optax.scale(-1.0)
"""
ENTRIES = "[rungs.optimizers]\nours = own_optimizers:ours\nbackwards = own_optimizers:backwards\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with two optimizers, as an installer leaves it."""
    (tmp_path / "own_optimizers.py").write_text(MODULE)
    metadata = tmp_path / "own_optimizers-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-optimizers\nVersion: 1.0")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_the_optimizer_of_a_package_is_used() -> None:
    model, wrapped = fresh("backwards")
    before, gradient = arrays(model), gradients(model)[0]
    update(model, wrapped, gradient)
    for name, expected in named(gradient).items():
        moved = arrays(model)[name] - before[name]
        np.testing.assert_allclose(moved, RATE * expected, atol=1e-6, err_msg=name)


@pytest.mark.usefixtures("installed")
def test_its_state_stays_without_a_finite_microbatch() -> None:
    test_without_a_finite_microbatch_nothing_moves("ours")


@pytest.mark.usefixtures("installed")
def test_its_name_is_known() -> None:
    assert list(conflicts(model_config(), train_config(optimizer="ours"))) == []
    [line] = conflicts(model_config(), train_config(optimizer="backward"))
    assert line == "optimizer: no optimizer is called 'backward'; did you mean backwards?"


def test_a_name_that_is_not_installed_is_refused() -> None:
    [line] = conflicts(model_config(), train_config(optimizer="adam"))
    assert line == "optimizer: no optimizer is called 'adam'; did you mean adamw?"

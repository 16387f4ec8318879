# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write your own optimizer
#
# An optimizer turns a gradient into a change of the parameters. In Optax it is a pair of pure
# functions: `init` makes the state from the parameters, `update` takes a gradient and the state
# and returns a direction and the next state. Here we write AdamW in that form, compare it with
# Optax's own, see the most common mistake of stateful optimizers in NNX, and train a run with ours
# through `train.py`.

# %%
import os
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from tools import docs_dataset, losses_of, make_run, run_command, work_folder

WORK = work_folder("optimizer")

# %% [markdown]
# ## 1. The plainest rule
#
# Stochastic gradient descent has no state: the direction is the gradient. `optax.apply_updates`
# adds updates to the parameters, so a learning rate is a factor of −η.

# %%
PARAMS = {"x": jnp.asarray([-2.0, 2.0])}


def loss(params: dict[str, jax.Array]) -> jax.Array:
    """A narrow valley: 50 times as steep in the second direction as in the first."""
    x, y = params["x"]
    return 0.5 * (x**2 + 50 * y**2)


def path_of(rule: optax.GradientTransformation, steps: int = 60) -> np.ndarray:
    """Return the points that an optimizer visits."""
    params, state = PARAMS, rule.init(PARAMS)
    points = [params["x"]]
    for _ in range(steps):
        updates, state = rule.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
        points.append(params["x"])
    return np.stack(points)


sgd = optax.chain(optax.identity(), optax.scale(-0.03))
print("SGD after 60 steps:", path_of(sgd)[-1])

# %% [markdown]
# ## 2. Adam
#
# Adam ([Kingma & Ba 2015](https://arxiv.org/abs/1412.6980), algorithm 1) keeps running means of
# the gradient, $m$, and of its square, $v$:
#
# $$m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2$$
#
# Both start at zero, so early means are too small. Dividing by $1-\beta^t$ corrects that. The
# direction is $\hat m_t / (\sqrt{\hat v_t} + \epsilon)$: every parameter moves about as far per
# step, however large its gradients are.


# %%
class AdamState(NamedTuple):
    count: jax.Array
    mean: Any
    square: Any


def scale_by_our_adam(
    beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
) -> optax.GradientTransformation:
    """Return Adam without a learning rate."""

    def init(params: Any) -> AdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(gradient: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        del params
        count = state.count + 1
        mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mean, gradient)
        square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g**2, state.square, gradient)

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            corrected = m / (1 - beta1**count), v / (1 - beta2**count)
            return corrected[0] / (jnp.sqrt(corrected[1]) + epsilon)

        return jax.tree.map(direction, mean, square), AdamState(count, mean, square)

    return optax.GradientTransformation(init, update)


adam = optax.chain(scale_by_our_adam(), optax.scale(-0.1))
for name, rule in {"SGD": sgd, "our Adam": adam}.items():
    plt.plot(*path_of(rule).T, marker=".", label=name)
x, y = np.meshgrid(np.linspace(-2.2, 0.8), np.linspace(-2.2, 2.2))
plt.contour(x, y, np.log(0.5 * (x**2 + 50 * y**2) + 0.1), levels=12, colors="0.85", zorder=0)
plt.legend()
plt.title("SGD jumps across the valley, Adam takes steps of equal size")
plt.show()

# %% [markdown]
# ## 3. Decoupled weight decay
#
# If we added $\lambda w$ to the gradient, Adam would divide it by $\sqrt v$ as well, and
# parameters with large gradients would hardly decay. AdamW ([Loshchilov & Hutter
# 2019](https://arxiv.org/abs/1711.05101)) adds it to the direction instead. A chain of
# transformations does just that, in order.


# %%
def add_our_weight_decay(decay: float) -> optax.GradientTransformation:
    """Add decay × parameter to each direction."""

    def update(directions: Any, params: Any) -> Any:
        return jax.tree.map(lambda d, p: d + decay * p, directions, params)

    return optax.stateless(update)


def our_adamw(rate: float, decay: float) -> optax.GradientTransformation:
    return optax.chain(scale_by_our_adam(), add_our_weight_decay(decay), optax.scale(-rate))


params = {"w": jax.random.normal(jax.random.key(0), (64, 64)), "b": jnp.zeros(64)}
ours, theirs = our_adamw(1e-3, 0.1), optax.adamw(1e-3, weight_decay=0.1)
both = {"ours": (ours, params, ours.init(params)), "optax": (theirs, params, theirs.init(params))}
for step in range(50):
    keys = jax.random.split(jax.random.key(step), 2)
    gradient = {
        "w": jax.random.normal(keys[0], (64, 64)),
        "b": 10 * jax.random.normal(keys[1], (64,)),
    }
    for name, (rule, p, state) in both.items():
        updates, state = rule.update(gradient, state, p)
        both[name] = rule, optax.apply_updates(p, updates), state
difference = max(
    float(jnp.abs(a - b).max())
    for a, b in zip(*(jax.tree.leaves(p) for _, p, _ in both.values()), strict=True)
)
print(f"largest difference from optax.adamw after 50 steps: {difference:.1e}")
assert difference < 1e-6  # rounding

# %% [markdown]
# ## 4. The trap: a step count that is not data
#
# NNX modules may hold Python values. `nnx.jit` treats them as *static*: part of the program, like
# a shape. A step count that is a Python int therefore makes a new program at every step, and JAX
# compiles every one of them. In NNX you can say what an attribute is: `nnx.static` or `nnx.data`.
# A count must be data: an array in a `Variable`.


# %%
class CountingOptimizer(nnx.Module):
    """SGD with a falling learning rate."""

    def __init__(self, count: Any) -> None:
        self.count = count

    def update(self, weight: nnx.Param, gradient: jax.Array) -> None:
        is_data = isinstance(self.count, nnx.Variable)
        count = self.count[...] if is_data else self.count
        weight[...] = weight[...] - 0.1 / (1 + count) * gradient
        if is_data:
            self.count[...] = count + 1
        else:
            self.count = nnx.static(count + 1)


def programs_compiled(count: Any, steps: int = 5) -> int:
    """Return how often a step was traced, and so compiled."""
    traces = []

    @nnx.jit
    def step(optimizer: CountingOptimizer, weight: nnx.Param) -> None:
        traces.append(1)  # runs only while tracing
        optimizer.update(weight, 2 * weight[...])

    optimizer, weight = CountingOptimizer(count), nnx.Param(jnp.ones(3))
    for _ in range(steps):
        step(optimizer, weight)
    return len(traces)


as_static = programs_compiled(nnx.static(0))
as_data = programs_compiled(nnx.data(nnx.Variable(jnp.zeros((), jnp.int32))))
print(f"five steps compile {as_static} programs with a static count, {as_data} with data")
assert (as_static, as_data) == (5, 1)

# %% [markdown]
# Optax makes this mistake hard: its states are trees of arrays, and `nnx.Optimizer` keeps them in
# variables.

# %% [markdown]
# ## 5. Use it in `train.py`
#
# `train.json` names its optimizer. Besides those that Rungs has, it can be one of any installed
# package that declares it as an *entry point* of the group `rungs.optimizers`: a function of
# `train.json`, the parameters and `model.json` that returns directions. Clipping, weight decay and
# the learning rate are applied around it. This is such a package:

# %%
package = WORK / "our-optimizers"
(package / "src" / "our_optimizers").mkdir(parents=True)
(package / "pyproject.toml").write_text("""
[project]
name = "our-optimizers"
version = "0.1.0"
requires-python = ">=3.11"

[project.entry-points."rungs.optimizers"]
our_adam = "our_optimizers:our_adam"

[build-system]
requires = ["uv_build"]
build-backend = "uv_build"
""")
(package / "src" / "our_optimizers" / "__init__.py").write_text('''
"""Adam, written by hand."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AdamState(NamedTuple):
    count: jax.Array
    mean: Any
    square: Any


def our_adam(train, params, model):
    """Return Adam with the keys of train.json."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(gradient, state, params=None):
        count = state.count + 1
        mean = jax.tree.map(
            lambda m, g: train.beta1 * m + (1 - train.beta1) * g, state.mean, gradient
        )
        square = jax.tree.map(
            lambda v, g: train.beta2 * v + (1 - train.beta2) * g**2, state.square, gradient
        )

        def direction(m, v):
            root = jnp.sqrt(v / (1 - train.beta2**count))
            return m / (1 - train.beta1**count) / (root + train.epsilon)

        return jax.tree.map(direction, mean, square), AdamState(count, mean, square)

    return optax.GradientTransformation(init, update)
''')

# %% [markdown]
# In a terminal you would write `uv run --with-editable ./our-optimizers train.py RUN`. Here we
# install it into a folder of its own, without the network, and put that on the path.

# %%
install = ("uv", "pip", "install", "--quiet", "--offline", "--python", sys.executable)
subprocess.run([*install, "--target", WORK / "installed", package], check=True)
os.environ["PYTHONPATH"] = str(WORK / "installed")
datasets = ("--datasets-dir", WORK / "datasets")
docs_dataset(WORK / "datasets")

# %%
MODEL = {"vocab_size": 512, "context_length": 64, "emb_dim": 64, "n_layers": 1, "n_heads": 2}
TRAIN = {
    "dataset": "docs",
    "min_train_tokens": -1,
    "epochs": 2,
    "shuffle": True,
    "microbatch_size": 16,
    "validation_tokens": 4096,
    "learning_rate": 0.003,
    "checkpoint_interval": 1000,
    "compute_dtype": "float32",
}
for name in ("adamw", "our_adam"):
    run = make_run(WORK / name, TRAIN | {"optimizer": name}, MODEL)
    run_command("train.py", run, *datasets, "--quiet")

# %%
adamw_losses, our_losses = losses_of(WORK / "adamw"), losses_of(WORK / "our_adam")
plt.plot(adamw_losses, label="adamw")
plt.plot(our_losses, "--", label="our_adam")
plt.xlabel("step")
plt.ylabel("loss")
plt.legend()
plt.show()
difference = np.abs(adamw_losses - our_losses).max()
print(f"largest difference of the losses: {difference:.1e}")
assert our_losses[-1] < our_losses[0] - 1
assert difference < 0.01  # rounding, grown over the steps

# %% [markdown]
# The run is resumed, mirrored, sharded and charted like any other. An optimizer that you want to
# keep can also go into `rungs/optim/optimizers.py`: see [Add an
# optimizer](../docs/tasks/add-an-optimizer.md).

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
# # Many devices
#
# How can one model be trained on eight devices? Where does each array live, and what do devices
# send each other? JAX can pretend that a CPU is eight devices. They are no faster, but they hold
# arrays and communicate like real ones, so all of it can be seen here. The same configs run on
# eight GPUs.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding

import rungs
from rungs.config.sharding_config import ShardingConfig
from rungs.objectives.table import make_train_step
from rungs.parallel.sharding import Layout, create_mesh, one_device
from rungs.planning.compiled_step import lower_step
from rungs.planning.program import Traffic, collectives, summary
from rungs.step.state import create_model_and_optimizer

jax.config.update("jax_num_cpu_devices", 8)  # before the first array
assert len(jax.devices()) == 8

# %% [markdown]
# ## 1. One step, four ways
#
# A step that one device takes can be spread over eight in four ways. Old code has `pmap`; newer
# code has `jit` with shardings, `shard_map` or explicit sharding. We write the same small step in
# each, and look at what it compiles to: [From pmap](../docs/from-pmap.md) explains each line.
#
# Two matmuls, an error, its gradient, an update. `sends` lists the collectives in a compiled step:
# operations in which all devices take part.

# %%
random = np.random.default_rng(0)
weights = {
    "up": random.normal(0, 0.1, (64, 256)).astype(np.float32),
    "down": random.normal(0, 0.1, (256, 64)).astype(np.float32),
}
batch = tuple(random.normal(size=(2, 32, 64)).astype(np.float32))  # inputs and targets


def loss(weights, batch):
    inputs_BD, targets_BD = batch
    hidden_BF = jnp.tanh(inputs_BD @ weights["up"])
    return jnp.square(hidden_BF @ weights["down"] - targets_BD).mean()


def update(weights, gradients):
    return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, gradients)


def train_step(weights, batch):
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    return update(weights, gradients), value


def sends(step, *arguments):
    found = collectives(step.lower(*arguments).compile())
    return ", ".join(f"{one.kind} of {one.result_bytes:,} bytes" for one in found)


expected = jax.jit(train_step)(weights, batch)


def assert_same(new_weights, value):
    for ours, theirs in zip(
        jax.tree.leaves((new_weights, value)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


# %% [markdown]
# ### pmap
#
# The step of one device. Weights are copied and the batch is reshaped, so that both have an axis of
# devices; `pmean` averages along it. Today `pmap` is `jit` of `shard_map`, and what it returns is
# an ordinary array, split along its first axis. So even `copy[0]` is a collective.


# %%
@functools.partial(jax.pmap, axis_name="data")
def pmap_step(weights, batch):
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    value, gradients = jax.lax.pmean((value, gradients), "data")
    return update(weights, gradients), value


copies = jax.tree.map(lambda weight: np.stack([weight] * 8), weights)
parts = jax.tree.map(lambda array: array.reshape(8, 4, 64), batch)
new_copies, values = pmap_step(copies, parts)
assert_same(jax.tree.map(lambda copy: copy[0], new_copies), values[0])
assert new_copies["up"].sharding.spec == jax.P("data")
print(sends(pmap_step, copies, parts))
print(sends(jax.jit(lambda copy: copy[0]), new_copies["up"]))

# %% [markdown]
# ### jit with shardings
#
# The step of the whole batch, unchanged. Shardings say where arguments and results are, and the
# compiler finds out that gradients have to be summed.

# %%
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
everywhere = NamedSharding(mesh, jax.P())
split = NamedSharding(mesh, jax.P("data"))
jit_step = jax.jit(train_step, in_shardings=(everywhere, split), out_shardings=everywhere)
assert_same(*jit_step(weights, batch))
print(sends(jit_step, weights, batch))

# %% [markdown]
# ### shard_map
#
# The step of one device, as with `pmap`, but on parts of whole arrays. The mean over the devices is
# in the loss, and its gradient takes care of the rest.

# %%
one_part_each = functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P()
)


@jax.jit
@one_part_each
def shard_map_step(weights, batch):
    def mean_loss(weights):
        return jax.lax.pmean(loss(weights, batch), "data")

    value, gradients = jax.value_and_grad(mean_loss)(weights)
    return update(weights, gradients), value


assert_same(*shard_map_step(weights, batch))
print(sends(shard_map_step, weights, batch))

# %% [markdown]
# With the body of the `pmap` step the gradients would be eight times too large: `shard_map` knows
# that the weights are the same everywhere and sums their gradients itself, and `pmean` of what is
# the same everywhere changes nothing.


# %%
@jax.jit
@one_part_each
def wrong_step(weights, batch):
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    value, gradients = jax.lax.pmean((value, gradients), "data")
    return update(weights, gradients), value


wrong, _ = wrong_step(weights, batch)
right, _ = expected
print(np.linalg.norm(wrong["up"] - weights["up"]) / np.linalg.norm(right["up"] - weights["up"]))

# %% [markdown]
# ### Explicit sharding
#
# The step of the whole batch again, on a mesh with `Explicit` axes. Now the types of arrays say
# where they are: `@data` marks the axis that is split. The types are known while the step is
# traced.

# %%
explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))


def typed_step(weights, batch):
    hidden_BF = jnp.tanh(batch[0] @ weights["up"])
    print("hidden", jax.typeof(hidden_BF), "loss", jax.typeof(loss(weights, batch)))
    return train_step(weights, batch)


with jax.set_mesh(explicit):
    placed = jax.device_put(weights, jax.P()), jax.device_put(batch, jax.P("data"))
    print("inputs", jax.typeof(placed[1][0]))
    assert jax.typeof(placed[1][0]).sharding.spec == jax.P("data", None)
    explicit_step = jax.jit(typed_step)
    assert_same(*explicit_step(*placed))
    print(sends(explicit_step, *placed))

# %% [markdown]
# Where it isn't clear how a result should be split, JAX asks instead of choosing.

# %%
with jax.set_mesh(explicit):
    columns = jax.device_put(weights["up"], jax.P(None, "data"))
    try:
        jnp.matmul(placed[1][0], columns)
    except Exception as error:
        print(type(error).__name__)
    answer = jnp.matmul(placed[1][0], columns, out_sharding=jax.P(None, "data"))
    print(jax.typeof(answer))

# %% [markdown]
# ### Split the weights, too
#
# With `pmap` every device has all weights. The other three can split them, as FSDP does, and gather
# them when they are used: `jit` by other shardings, `shard_map` by an `all_gather`, whose gradient
# is a reduce-scatter, and explicit sharding by other arguments.

# %%
jit_fsdp = jax.jit(train_step, in_shardings=(split, split), out_shardings=(split, everywhere))
assert_same(*jit_fsdp(weights, batch))


@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(jax.P("data"), jax.P("data")),
    out_specs=(jax.P("data"), jax.P()),
)
def shard_map_fsdp(parts, batch):
    def mean_loss(parts):
        whole = jax.tree.map(lambda part: jax.lax.all_gather(part, "data", tiled=True), parts)
        return jax.lax.pmean(loss(whole, batch), "data")

    value, gradients = jax.value_and_grad(mean_loss)(parts)
    return update(parts, gradients), value


assert_same(*shard_map_fsdp(weights, batch))
print(sends(shard_map_fsdp, weights, batch))

with jax.set_mesh(explicit):
    placed = jax.device_put((weights, batch), jax.P("data"))
    explicit_fsdp = jax.jit(train_step)
    assert_same(*explicit_fsdp(*placed))
    print(sends(explicit_fsdp, *placed))

# %% [markdown]
# `shard_map` compiles to what is written. With explicit sharding the gradients are summed and then
# cut; XLA's compiler for GPUs can make one reduce-scatter of that, the one for CPUs doesn't. `jit`
# leaves the choice to the compiler, which may move activations instead of weights.


# %%
def draw_traffic(traffic: dict[str, list[Traffic]]) -> None:
    kinds = sorted({sent.kind for found in traffic.values() for sent in found})
    bottom = np.zeros(len(traffic))
    for kind in kinds:
        sizes = [
            sum(sent.moved_bytes for sent in found if sent.kind == kind) / 1e6
            for found in traffic.values()
        ]
        plt.bar(list(traffic), sizes, bottom=bottom, label=kind)
        bottom += sizes
    plt.ylabel("megabytes that one device sends in a step")
    plt.ylim(0, 1.05 * bottom.max())
    plt.legend(loc="lower center", ncols=len(kinds), bbox_to_anchor=(0.5, 1), columnspacing=1)
    plt.show()


programs = {
    "whole weights": jit_step.lower(weights, batch),
    "jit": jit_fsdp.lower(weights, batch),
    "shard_map": shard_map_fsdp.lower(weights, batch),
}
with jax.set_mesh(explicit):
    programs["explicit"] = explicit_fsdp.lower(*placed)
draw_traffic({name: summary(collectives(one.compile()), mesh) for name, one in programs.items()})
print("jit:", sends(jit_fsdp, weights, batch))

# %% [markdown]
# ## 2. The modes
#
# A mesh is an array of devices with named axes. A sharding mode says along which of them each
# array is split.
#
# - `dp`, data parallelism: every device has all weights and an eighth of the batch.
# - `fsdp`: every device also has only an eighth of the weights, and gathers a layer's when it
#   needs them.
# - `tp`, tensor parallelism: every device has some of the heads and of the hidden units of each
#   layer.
# - `fsdp_tp`: both, along two axes.
# - `cp`, context parallelism: as `fsdp`, and every sequence is split, too.

# %%
MODEL = rungs.ModelConfig(
    vocab_size=512, context_length=64, emb_dim=64, n_layers=2, n_heads=8, positions="rope"
)
MODES = {
    "dp": ShardingConfig(mode="dp", data=8),
    "fsdp": ShardingConfig(mode="fsdp", data=8),
    "tp": ShardingConfig(mode="tp", tensor=8),
    "fsdp_tp": ShardingConfig(mode="fsdp_tp", data=4, tensor=2),
    "cp": ShardingConfig(mode="cp", data=2, context=4),
}


def config_of(sharding: ShardingConfig) -> rungs.RunConfig:
    train = rungs.TrainConfig(
        dataset="none",
        microbatch_size=8,
        min_train_tokens=-1,
        learning_rate=1e-3,
        checkpoint_interval=1,
        compute_dtype="float32",
        sharding=sharding,
    )
    return rungs.RunConfig(MODEL, train)


MESHES = {name: create_mesh(s.sizes, s.axes) for name, s in MODES.items()}
STATES = {
    name: create_model_and_optimizer(config_of(sharding), 10, MESHES[name])
    for name, sharding in MODES.items()
}
for name, mesh in MESHES.items():
    print(f"{name:8} {dict(mesh.shape)}")

# %% [markdown]
# ## 3. Where arrays live
#
# Each picture is the query kernel of the first layer, 64 inputs × 64 outputs (8 heads of 8). A
# colour is a device, or several that hold the same part.


# %%
def owners(array: jax.Array) -> np.ndarray:
    """Return, for each element of a matrix, the number of the first device that has it."""
    first = np.full(array.shape, -1)
    for shard in array.addressable_shards:
        part = first[shard.index]
        first[shard.index] = np.where(
            part == -1, shard.device.id, np.minimum(part, shard.device.id)
        )
    return first


figure, axes = plt.subplots(1, len(MODES), figsize=(14, 3))
for axis, (name, (model, _)) in zip(axes, STATES.items(), strict=True):
    kernel_LDNH = model.blocks.attention.query.kernel[...]
    first_DN = owners(kernel_LDNH)[0].reshape(64, 64)
    shape = kernel_LDNH.addressable_shards[0].data.shape
    axis.imshow(first_DN, cmap="tab10", vmin=0, vmax=9)
    axis.set_title(f"{name}: {shape}")
    axis.set_xticks([])
    axis.set_yticks([])
axes[0].set_ylabel("inputs")
plt.show()


# %%
def megabytes(tree: object, device: jax.Device) -> float:
    """Return what one device holds of all arrays."""
    shards = [s for array in jax.tree.leaves(tree) for s in array.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device) / 1e6


held = {
    name: tuple(megabytes(nnx.state(part), jax.devices()[0]) for part in state)
    for name, state in STATES.items()
}
weights, moments = zip(*held.values(), strict=True)
plt.bar(list(held), weights, label="weights")
plt.bar(list(held), moments, bottom=weights, label="optimizer state")
plt.ylabel("megabytes on one device")
plt.legend()
plt.show()
assert held["fsdp"][0] < held["dp"][0] / 7

# %% [markdown]
# On GPUs and TPUs `dp` splits the optimizer state, too (ZeRO-1); CPUs keep all of it.

# %% [markdown]
# ## 4. What they send
#
# The compiler turns shardings into *collectives*: operations that all devices take part in.
#
# | collective | each device ends up with |
# |---|---|
# | all-gather | all parts of an array that was split |
# | reduce-scatter | its part of the sum of everyone's arrays |
# | all-reduce (psum) | the whole sum |
# | all-to-all | a part from everyone: the split moves to another axis |
#
# We compile a training step in each mode and count them in the program.

# %%
traffic = {}
for name, sharding in MODES.items():
    program = lower_step(config_of(sharding), MESHES[name]).compile().as_text()
    traffic[name] = summary(collectives(program), MESHES[name])
    for sent in traffic[name]:
        where = f"{sent.kind} along {' × '.join(sent.axes)}"
        print(f"{name:8} {where:36} {sent.runs:4} times {sent.moved_bytes / 1e6:7.2f} MB")

draw_traffic(traffic)
assert {sent.kind for sent in traffic["dp"]} == {"all-reduce"}
assert "all-gather" in {sent.kind for sent in traffic["fsdp"]}
assert "all-to-all" in {sent.kind for sent in traffic["cp"]}

# %% [markdown]
# `dp` sends gradients, whatever the batch. `tp` sends activations, so a larger batch costs more.
# That is why `tp` stays within a host, where links are fast, and `fsdp` goes across hosts.

# %% [markdown]
# ## 5. The same step
#
# Whatever the mode, the step is the same mathematics. We take one on each mesh, from the same
# weights and with the same batch, and compare the losses with that of one device.

# %%
tokens_ABS = np.random.default_rng(0).integers(0, 512, (1, 8, 65)).astype(np.int32)


def loss_of(name: str) -> float:
    """Return the loss of a first step."""
    sharding = MODES.get(name, ShardingConfig(mode="dp", data=1))
    mesh = MESHES.get(name, one_device())
    config = config_of(sharding)
    model, optimizer = STATES.get(name) or create_model_and_optimizer(config, 10, mesh)
    place = jax.sharding.NamedSharding(mesh, Layout(mesh).batch_spec(3))
    inputs = jax.device_put(tokens_ABS[..., :-1], place)
    targets = jax.device_put(tokens_ABS[..., 1:], place)
    step = make_train_step(config.train, mesh)
    return float(step(model, optimizer, inputs, targets, None).losses_A[0])


reference = loss_of("one device")
for name in MODES:
    first = loss_of(name)
    print(f"{name:8} loss {first:.7f}, {first - reference:+.1e} from one device")
    assert abs(first - reference) < 1e-5

# %% [markdown]
# `uv run smoke_tests/test_parallel.py RUN` does this for a run of yours, with gradients and
# updates, in every mode and every split of the batch.

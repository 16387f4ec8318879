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
import jax
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import rungs
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel.sharding import Layout, create_mesh, one_device
from rungs.planning.compiled.collectives import collectives, summary
from rungs.planning.compiled.step import lower_step
from rungs.step.state import create_model_and_optimizer
from rungs.step.train_step import make_train_step

jax.config.update("jax_num_cpu_devices", 8)  # before the first array
assert len(jax.devices()) == 8

# %% [markdown]
# ## 1. The modes
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
# ## 2. Where arrays live
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
# ## 3. What they send
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

kinds = sorted({sent.kind for found in traffic.values() for sent in found})
bottom = np.zeros(len(MODES))
for kind in kinds:
    sizes = [
        sum(sent.moved_bytes for sent in found if sent.kind == kind) / 1e6
        for found in traffic.values()
    ]
    plt.bar(list(MODES), sizes, bottom=bottom, label=kind)
    bottom += sizes
plt.ylabel("megabytes that one device sends in a step")
plt.margins(y=0.1)
plt.legend()
plt.show()
assert {sent.kind for sent in traffic["dp"]} == {"all-reduce"}
assert "all-gather" in {sent.kind for sent in traffic["fsdp"]}
assert "all-to-all" in {sent.kind for sent in traffic["cp"]}

# %% [markdown]
# `dp` sends gradients, whatever the batch. `tp` sends activations, so a larger batch costs more.
# That is why `tp` stays within a host, where links are fast, and `fsdp` goes across hosts.

# %% [markdown]
# ## 4. The same step
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
    loss = loss_of(name)
    print(f"{name:8} loss {loss:.7f}, {loss - reference:+.1e} from one device")
    assert abs(loss - reference) < 1e-5

# %% [markdown]
# `uv run smoke_tests/test_parallel.py RUN` does this for a run of yours, with gradients and
# updates, in every mode and every split of the batch.

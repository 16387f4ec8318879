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
# # Memory, FLOPs and muP
#
# What will a run take? And which learning rate will a larger model want? You can find out both on
# a small computer. We count parameters, memory and FLOPs by hand, compare them with what the
# compiler says, and check with a *coordinate check* that muP keeps activations equally large at
# any width.

# %%
import json
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display
from tools import ROOT, docs_dataset, make_run, run_command, work_folder

import rungs
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel.sharding import one_device
from rungs.planning.compiled_step import lower_step
from rungs.planning.flops import hardware_flops_per_token
from rungs.planning.memory import memory_of

WORK = work_folder("plan")

# %% [markdown]
# ## 1. Parameters, by hand
#
# A layer of GPT-2 with width D has 4·D² weights in attention (query, key, value, output) and 8·D²
# in the feed-forward layer. The embedding and the head have V·D each.

# %%
D, L, V, S, F = 128, 4, 4096, 128, 4 * 128  # runs/layers
by_hand = 2 * V * D + L * (4 * D * D + 2 * D * F)
plan = subprocess.run(
    [sys.executable, "plan.py", "runs/layers", "--json"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
)
planned = json.loads(plan.stdout)
vectors = planned["parameters"]["total"] - by_hand
print(f"matrices {by_hand:,}, vectors {vectors:,}, planned {planned['parameters']['total']:,}")
assert 0 < vectors < 0.01 * by_hand  # biases and norms

# %% [markdown]
# ## 2. FLOPs, by hand
#
# Each weight of a matmul costs a multiplication and an addition for a token, and twice that in the
# backward pass: 6 FLOPs for each weight. Attention compares each token with S/2 others on average:
# 2·S·D for scores and values together, forward; three times that with the backward pass. (Looking
# up an embedding costs none.)

# %%
weights = V * D + L * (4 * D * D + 2 * D * F)
pairs = (S + 1) / 2
without_recompute = 6 * weights + 3 * L * 2 * 2 * pairs * D
parts = planned["flops_per_token"]
total = sum(sum(part.values()) for part in parts.values() if isinstance(part, dict))
recomputed = sum(part["recompute"] for part in parts.values() if isinstance(part, dict))
print(
    f"by hand {without_recompute:,.0f}; planned {total:,.0f}, of which recomputed {recomputed:,.0f}"
)

# %% [markdown]
# The plan counts a little more, because the program does more: attention works in blocks, which
# include pairs that the mask leaves out, 96 for each token instead of 64.5. And the backward pass
# computes the scores again instead of keeping them.

# %%
in_blocks = parts["attention"]["forward"] / (L * 2 * 2 * D)
print(f"pairs for each token: {in_blocks} computed, {pairs} needed")
assert total == without_recompute + recomputed + 3 * L * 2 * 2 * (in_blocks - pairs) * D

# %% [markdown]
# ## 3. Memory, against the compiler
#
# The plan adds up weights, moments, gradients, and what the forward pass keeps for the backward
# pass. The compiler knows exactly what its program needs. We compile steps of several sizes,
# without running them, and compare.


# %%
def config_of(emb_dim: int, microbatch_size: int, remat: str) -> rungs.RunConfig:
    model = rungs.ModelConfig(
        vocab_size=2048, context_length=128, emb_dim=emb_dim, n_layers=4, n_heads=4
    )
    train = rungs.TrainConfig(
        dataset="none",
        microbatch_size=microbatch_size,
        min_train_tokens=-1,
        learning_rate=1e-3,
        checkpoint_interval=1,
        compute_dtype="float32",
        remat=remat,
        sharding=ShardingConfig(mode="dp", data=1),
    )
    return rungs.RunConfig(model, train)


def compiled_megabytes(config: rungs.RunConfig) -> float:
    """Return what the compiled step needs: its arguments and its temporary arrays."""
    analysis = lower_step(config, one_device()).compile().memory_analysis()
    return (analysis.argument_size_in_bytes + analysis.temp_size_in_bytes) / 1e6


cases = [(128, 8, "none"), (128, 8, "dots"), (128, 8, "full"), (256, 8, "dots"), (128, 32, "dots")]
names = [f"D {emb_dim}, B {batch}, remat {remat}" for emb_dim, batch, remat in cases]
configs = [config_of(*case) for case in cases]
estimates = [memory_of(config, one_device()).total / 1e6 for config in configs]
measured = [compiled_megabytes(config) for config in configs]
for name, estimate, found in zip(names, estimates, measured, strict=True):
    print(f"{name:26} planned {estimate:6.1f} MB, compiled {found:6.1f} MB, {estimate / found:.2f}")
place = np.arange(len(cases))
plt.barh(place - 0.2, estimates, 0.4, label="planned")
plt.barh(place + 0.2, measured, 0.4, label="compiled")
plt.yticks(place, names)
plt.xlabel("megabytes")
plt.gca().invert_yaxis()
plt.legend()
plt.tight_layout()
plt.show()
assert all(0.75 < a / b < 1.33 for a, b in zip(estimates, measured, strict=True))

# %% [markdown]
# `remat` trades memory for work: with `full` the backward pass computes each layer again.

# %%
for remat in ("none", "dots", "full"):
    flops = hardware_flops_per_token(config_of(128, 8, remat)).total
    kept = memory_of(config_of(128, 8, remat), one_device()).activations
    print(f"{remat:5} {flops / 1e6:5.1f} MFLOPs per token, activations {kept / 1e6:5.1f} MB")

# %% [markdown]
# ## 4. muP
#
# With the usual parametrization a wider model wants a smaller learning rate. muP ([Yang et al.
# 2022](https://arxiv.org/abs/2203.03466)) scales initial weights and learning rates with the width
# so that activations, and what a step changes in them, stay equally large. Then the best rate
# stays the best. The check trains three models, from different initial weights, for a few steps at
# several widths and fits a power of the width to each activation's size: it should be near 0.

# %%
docs_dataset(WORK / "datasets")
MODEL = {"vocab_size": 512, "context_length": 64, "emb_dim": 64, "n_layers": 2, "n_heads": 2}
TRAIN = {
    "dataset": "docs",
    "min_train_tokens": 40_000,
    "microbatch_size": 16,
    "validation_tokens": 4096,
    "learning_rate": 0.01,
    "weight_decay": 0,
    "checkpoint_interval": 1000,
}
run = make_run(WORK / "mup", TRAIN, MODEL | {"mup": {"base_emb_dim": 64}})
options = ("--widths", "64,128,256", "--datasets-dir", WORK / "datasets")
run_command("mup.py", "check", run, *options)
display(Image(str(run / "coordinate-check.png"), width=700))

# %% [markdown]
# Lines that stay flat from left to right are what muP promises. An experiment with `widths`
# tries learning rates at several of them:
# [Find a learning rate](../docs/tasks/find-a-learning-rate.md).

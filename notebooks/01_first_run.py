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
# # A first run
#
# A run is a folder with two files: `model.json` says what to train, `train.json` how. Training
# fills the same folder. We make a run with the smallest model there is, *A-to-A*, which learns to
# repeat its input, look at what training writes, kill it, and resume it.

# %%
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display
from tools import ROOT, run_command, work_folder

import rungs

WORK = work_folder("first-run")
DATASETS = ("--datasets-dir", WORK / "datasets")

# %% [markdown]
# ## 1. A dataset
#
# A dataset is text as token ids. This one is made of the documentation of Rungs: a tokenizer of
# 512 tokens is trained on it, and 5% of it is held out for validation.

# %%
texts = sorted(ROOT.glob("docs/*.md"))
size = ("--vocab-size", 512)
run_command("download_dataset.py", "--text", *texts, "--name", "docs", *size, *DATASETS)

# %% [markdown]
# ## 2. The run
#
# With no layers, the embedding of a token goes straight into the output head. With `target_offset`
# 0 the target of each token is the token itself: A to A. A model that can't learn this has a bug.

# %%
MODEL = {
    "vocab_size": 512,
    "context_length": 64,
    "emb_dim": 32,
    "n_layers": 0,
    "positions": "none",
    "norm": "none",
}
TRAIN = {
    "dataset": "docs",
    "target_offset": 0,
    "min_train_tokens": 80_000,
    "shuffle": True,
    "microbatch_size": 8,
    "validation_tokens": 4096,
    "learning_rate": 0.03,
    "checkpoint_interval": 25,
}


def make_run(run: Path, train: dict[str, object], model: dict[str, object]) -> Path:
    """Write the two files of a run."""
    run.mkdir()
    (run / "model.json").write_text(json.dumps(model, indent=2))
    (run / "train.json").write_text(json.dumps(train, indent=2))
    return run


run = make_run(WORK / "a-to-a", TRAIN, MODEL)
run_command("train.py", run, *DATASETS)

# %% [markdown]
# ## 3. What it wrote

# %%
print("\n".join(sorted(path.name for path in run.iterdir())))
display(Image(str(run / "loss-chart.png"), width=600))

# %%
steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
print(json.dumps(steps[-1], indent=2))


def losses_of(run: Path) -> np.ndarray:
    """Return the loss of each step: one line of metrics.jsonl each."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return np.asarray([json.loads(line)["train_loss"] for line in lines])


print(f"loss: {losses_of(run)[0]:.2f} at first, which is ln 512 = {np.log(512):.2f}: pure guessing")
print(f"loss: {losses_of(run)[-1]:.4f} at the end")
assert abs(losses_of(run)[0] - np.log(512)) < 0.1
assert losses_of(run)[-1] < 0.1

# %% [markdown]
# The model has never seen this verse, and repeats it token for token.

# %%
model, tokenizer = rungs.load_model(run), rungs.load_tokenizer(run)
verse = "Tyger Tyger, burning bright, In the forests of the night"
ids = tokenizer.encode(verse)
repeated = tokenizer.decode(np.asarray(model(np.asarray([ids]))).argmax(-1)[0])
print(repeated)
assert repeated == verse

# %% [markdown]
# ## 4. Kill it, and resume
#
# We start the same run again in another folder and kill it with SIGKILL, which no program can
# catch, as soon as it has a checkpoint. Then we give the same command once more.

# %%
killed = make_run(WORK / "killed", TRAIN, MODEL)
command = [sys.executable, str(ROOT / "train.py"), str(killed), *map(str, DATASETS)]
process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while not (killed / "checkpoints" / "latest").exists():
    assert process.poll() is None, "training ended before its first checkpoint"
    time.sleep(0.02)
process.kill()
process.wait()
print("killed after step", len(losses_of(killed)) - 1)
run_command("train.py", killed, *DATASETS)

# %%
plt.plot(losses_of(run), label="never stopped")
plt.plot(losses_of(killed), "--", label="killed and resumed")
plt.yscale("log")
plt.xlabel("step")
plt.ylabel("loss in nats")
plt.legend()
plt.show()
assert (losses_of(run) == losses_of(killed)).all()
weights = [rungs.load_model(folder).head.kernel[...] for folder in (run, killed)]
assert (weights[0] == weights[1]).all()
print("losses and weights are equal, bit for bit")

# %% [markdown]
# ## 5. Change one key
#
# `--like` copies a run with a key changed, and `charts.py` compares the two.

# %%
run_command(
    "train.py", WORK / "slow", "--like", run, "--set", "learning_rate=0.003", *DATASETS, "--quiet"
)
run_command("charts.py", run, WORK / "slow", "--page", WORK / "compare.html")
for folder in (run, WORK / "slow"):
    plt.plot(losses_of(folder), label=folder.name)
plt.yscale("log")
plt.xlabel("step")
plt.ylabel("loss in nats")
plt.legend()
plt.show()
assert losses_of(WORK / "slow")[-1] > losses_of(run)[-1]
shutil.rmtree(WORK)

# %% [markdown]
# The other notebooks import such helpers from [tools.py](tools.py). Next: [GPT-2](02_gpt2.ipynb),
# or climb [the ladder](../runs/README.md).

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
# # Reinforcement learning from verifiable rewards
#
# Nobody says what to write; a program, the *verifier*, says how good it was. We derive the gradient
# that this gives, check it against the exact one, train a small model until it prefers to show its
# work, replay a step, and watch a model cheat a careless verifier.

# %%
import itertools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display
from tools import ROOT, run_command, work_folder

WORK = work_folder("reinforcement")
DATASETS = ("--datasets-dir", WORK / "datasets")

# %% [markdown]
# ## 1. The gradient of an expected reward
#
# A policy draws an answer *a* with probability π(a), and is paid r(a). Its expected reward is
# Σ π(a)·r(a), and the gradient of that is Σ π(a)·r(a)·∇log π(a): the mean, over answers that the
# policy itself draws, of reward × ∇log π (Williams 1992). So we need no derivative of the reward.
#
# Here there are four answers, so the exact gradient can be computed.

# %%
logits = jnp.asarray([0.5, 0.0, -0.5, -1.0])
rewards = jnp.asarray([1.0, 1.2, 1.0, 2.0])
exact = jax.grad(lambda logits: jnp.sum(jax.nn.softmax(logits) * rewards))(logits)
print("probabilities", np.round(jax.nn.softmax(logits), 2), "exact gradient", np.round(exact, 3))


# %% [markdown]
# A *group* of G answers gives an estimate. Anything that does not depend on an answer may be
# subtracted from its reward without a bias, because Σ π(a)·∇log π(a) = 0. The mean of the *other*
# answers in the group is such a baseline: it leaves only how much better an answer is. That is
# what `"advantage": "leave_one_out"` means.


# %%
def advantages(rewards_G: np.ndarray, kind: str) -> np.ndarray:
    """Return what multiplies ∇log π of each answer in a group."""
    size = len(rewards_G)
    if kind == "reward":
        return rewards_G
    if kind == "leave_one_out":
        return rewards_G - (rewards_G.sum() - rewards_G) / (size - 1)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-4)


slopes = jax.vmap(jax.grad(lambda logits, a: jax.nn.log_softmax(logits)[a]), (None, 0))
slopes_AA = np.asarray(slopes(logits, jnp.arange(4)), np.float64)
probabilities = np.asarray(jax.nn.softmax(logits), np.float64)


def estimates(kind: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the estimate of every possible group, and the probability of each."""
    groups = np.asarray(list(itertools.product(range(4), repeat=size)))
    weights = np.stack(
        [advantages(np.asarray(rewards, np.float64)[group], kind) for group in groups]
    )
    found = (weights[:, :, None] * slopes_AA[groups]).mean(axis=1)
    return found, probabilities[groups].prod(axis=1)


kinds = ("reward", "leave_one_out", "mean_std")
spreads = {}
for kind in kinds:
    found, chance = estimates(kind, 4)
    mean = chance @ found
    spreads[kind] = float(chance @ ((found - mean) ** 2).sum(axis=1)) ** 0.5
    print(f"{kind:14} expects {np.round(mean, 3)}, spread {spreads[kind]:.2f}")
    if kind != "mean_std":
        np.testing.assert_allclose(mean, exact, atol=1e-6)
assert spreads["leave_one_out"] < 0.5 * spreads["reward"]

# %% [markdown]
# Plain rewards and `leave_one_out` give the exact gradient on average, and the baseline makes a
# single estimate far more precise. Dividing by the standard deviation (`mean_std`, as in GRPO) is
# biased: it weights prompts more on which the policy is nearly always right or wrong. In Rungs you
# choose, and tests compare each choice with the exact gradient of a small GPT.

# %% [markdown]
# ## 2. A model that guesses, or shows its work
#
# The task: is the number of ones in 16 bits odd? The model has seen pairs: four of five answers are
# short, `=1`, which it can only guess; one of five is worked, with the parity of the first bit, of
# the first two, and so on.

# %%
pretrain = WORK / "pretrain"
run_command("train.py", pretrain, "--like", "runs/parity-pretrain", *DATASETS, "--quiet")
run_command("generate.py", pretrain, "0110100101101001:", "--num-samples", 8, "--temperature", 1)

# %% [markdown]
# ## 3. Let the verifier decide
#
# Each step draws 32 prompts, samples 8 answers to each, asks the verifier, and takes one step along
# the estimated gradient.

# %%
reinforced = WORK / "reinforced"
STEPS = ("--set", "steps=25", "--set", "checkpoint_interval=12")
start = ("--set", f"start_from={pretrain}")
run_command("reinforce.py", reinforced, "--like", "runs/parity-rl", *start, *STEPS)
display(Image(str(reinforced / "reward-chart.png"), width=600))

# %% [markdown]
# Every text is kept. The answers to one prompt, at the first step and at the last:


# %%
def rollouts(run: Path, step: int) -> list[dict[str, object]]:
    """Return the texts of a step."""
    lines = (run / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


for step in (0, 24):
    texts = [text for text in rollouts(reinforced, step) if text["place"] == 0]
    print(f"step {step}: {texts[0]['prompt']}")
    for text in texts:
        print(f"  {text['text']:20} reward {sum(text['rewards'].values()):.0f}")

# %% [markdown]
# Nobody told it to show its work. Worked answers are right more often, so they have a positive
# advantage, and become more frequent.


# %%
def percent_worked(run: Path, step: int) -> float:
    """Return how many of a step's answers show their work, in percent."""
    return 100 * float(np.mean([len(text["text"]) > 2 for text in rollouts(run, step)]))


worked = [percent_worked(reinforced, step) for step in range(25)]
right = [
    100 * np.mean([sum(text["rewards"].values()) for text in rollouts(reinforced, step)])
    for step in range(25)
]
plt.plot(worked, label="show their work")
plt.plot(right, label="are right")
plt.xlabel("step")
plt.ylabel("% of the answers")
plt.legend()
plt.show()
assert worked[-1] > 80 > 40 > worked[0]
assert right[-1] > right[0] + 15

# %% [markdown]
# Any step can be sampled again, from the weights before it: its texts, rewards and gradient are the
# same, bit for bit.

# %%
run_command("reinforce.py", reinforced, "--replay", "step-000013")

# %% [markdown]
# ## 4. What a careless verifier gets
#
# A model learns to do what is paid, not what was meant. This verifier pays right answers most, and
# a bonus for brief ones. Before it trains, Rungs asks each verifier about the right answer, an
# empty text, the prompt and others, and refuses one that pays those as well. This one passes.

# %%
hacked = WORK / "hacked"
hacked.mkdir()
(hacked / "model.json").write_text((reinforced / "model.json").read_text())
verifier = """def reward(prompt, completion, answer, info):
    correct = float(completion.rpartition("=")[2] == answer)
    brief = 0.75 if len(completion) <= 2 else 0.0
    return {"correct": correct, "brief": brief}
"""
(hacked / "reward.py").write_text(verifier)
config = json.loads((reinforced / "reinforce.json").read_text())
config.pop("lineage")
config["tasks"][0]["verifier"] = "reward.py"
config |= {"steps": 20, "learning_rate": 0.0003}
(hacked / "reinforce.json").write_text(json.dumps(config))
run_command("reinforce.py", hacked, "--trust-verifier")
run_command("reinforce.py", hacked, "--audit")

# %% [markdown]
# The reward rises while fewer answers are right: a guess is paid 0.5 + 0.75 on average, more than
# the 1 of work that is always right. The line with ! says what looks wrong. So watch pass@1 on
# held-out items, read texts, and keep bonuses small.

# %%
hurried = [percent_worked(hacked, step) for step in range(20)]
plt.plot(worked, label="paid for right answers")
plt.plot(hurried, label="and for brief ones")
plt.xlabel("step")
plt.ylabel("% of the answers that show their work")
plt.legend()
plt.show()
assert hurried[-1] < hurried[0]
shutil.rmtree(WORK)

# %% [markdown]
# ## 5. A published model
#
# The same with a model from the hub, and items in a file: sums, whose answer is the last number of
# the text.

# %%
LOAD_FROM_HUB = False  # needs the network, 1 GB of disk space and, for speed, a GPU

if LOAD_FROM_HUB:
    qwen = ROOT / "runs" / "qwen"
    run_command("pretrained.py", "import", "Qwen/Qwen2.5-0.5B-Instruct", qwen)
    with (qwen / "sums.jsonl").open("w") as file:
        for a, b in itertools.product(range(10, 60), range(10, 30)):
            item = {
                "prompt": f"What is {a} + {b}? Think, then say the sum.\n",
                "answer": str(a + b),
            }
            file.write(json.dumps(item) + "\n")
    config = {
        "start_from": "imported",
        "tasks": [{"source": "sums.jsonl", "verifier": "last_number", "validation_items": 64}],
        "steps": 50,
        "prompts_per_step": 16,
        "samples_per_prompt": 8,
        "max_new_tokens": 64,
        "microbatch_size": 16,
        "learning_rate": 1e-6,
        "checkpoint_interval": 10,
    }
    (qwen / "reinforce.json").write_text(json.dumps(config, indent=2))
    run_command("reinforce.py", qwen)

# %% [markdown]
# More, such as tasks and verifiers of your own: [Reinforcement
# learning](../docs/reinforcement.md).

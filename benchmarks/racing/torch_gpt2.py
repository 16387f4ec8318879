# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy>=2.2"]
# ///
"""The PyTorch side of `race.py`: GPT-2, compiled, with AdamW, for so many minutes.

Takes a JSON object as argument and prints a line of JSON for each validation: the seconds since the
first step was compiled, the number of steps, and the loss. The learning rate follows the clock: it
rises over the first part of the minutes, and falls to zero at their end.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.training_speed.torch_side import TorchGPT, attention_context, choose_attention

WARM_UP, WEIGHT_DECAY, BETAS, CLIP = 0.05, 0.1, (0.9, 0.95), 1.0


def windows(asked: dict[str, Any]) -> Iterator[Tensor]:
    """Yield batches of sequences, in another order in each epoch."""
    tokens, length = np.load(asked["train"], mmap_mode="r"), asked["length"]
    count, size = (len(tokens) - 1) // length, asked["sequences"]
    generator = np.random.default_rng(asked["seed"])
    while True:
        order = generator.permutation(count)
        for first in range(0, count - size + 1, size):
            starts = order[first : first + size] * length
            rows = [tokens[start : start + length + 1] for start in starts]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters with and without weight decay."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]


class Race:
    """A model in training."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        shape = (asked[key] for key in ("vocab", "length", "width", "heads", "layers"))
        self.model = TorchGPT(*shape).to(self.device)
        fused = {"lr": asked["learning_rate"], "betas": BETAS, "fused": True}
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model), **fused)
        self.attention = choose_attention(asked, self.device)
        self.run = torch.compile(self.model)
        self.validation = torch.from_numpy(np.load(asked["validation"]).astype(np.int64))

    def loss(self, sequences: Tensor) -> Tensor:
        sequences = sequences.to(self.device, non_blocking=True)
        is_narrow = self.asked["dtype"] == "bfloat16"
        autocast = torch.autocast(self.device, torch.bfloat16, enabled=is_narrow)
        with attention_context(self.attention), autocast:
            loss: Tensor = self.run(sequences[:, :-1], sequences[:, 1:])
        return loss

    def step(self, sequences: Tensor, part: float) -> None:
        """Take a step.

        Args:
            part: of the minutes that is over.
        """
        rate = min(part / WARM_UP, (1 - part) / (1 - WARM_UP))
        for group in self.optimizer.param_groups:
            group["lr"] = self.asked["learning_rate"] * max(rate, 0.0)
        microbatches = sequences.split(self.asked["microbatch"])
        for microbatch in microbatches:
            (self.loss(microbatch) / len(microbatches)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def validate(self) -> float:
        losses = [self.loss(rows) for rows in self.validation.split(self.asked["microbatch"])]
        return float(torch.stack(losses).float().mean())

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.manual_seed(asked["seed"])
    torch.set_num_threads(asked["threads"])
    torch.set_float32_matmul_precision("high")
    race, batches = Race(asked), windows(asked)
    race.step(next(batches), 0.0)  # compiles; at a learning rate of 0
    race.validate()
    race.synchronize()
    total, steps, begin = 60 * asked["minutes"], 0, time.perf_counter()
    for number in range(1, asked["validations"] + 1):
        while (passed := time.perf_counter() - begin) < total * number / asked["validations"]:
            race.step(next(batches), passed / total)
            race.synchronize()
            steps += 1
        result = {"seconds": passed, "step": steps, "loss": race.validate()}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

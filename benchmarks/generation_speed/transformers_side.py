# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0"]
# ///
"""A side of `generation_speed.py`: GPT-2's shape in `transformers`, with random weights, on the GPU
if there is one: `transformers_side.py '{"rows": 16, "dtypes": ["bfloat16"], "config": {}}'`.

Reads lines of JSON, [dtype, batch, tokens of the prompt, new tokens], and answers each with the
seconds of one greedy generation.
"""

import json
import os
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    asked = json.loads(sys.argv[1])
    if os.environ.get("RUNGS_BENCHMARK_NEEDS_GPU") and not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(**asked["config"])
    models = {
        dtype: GPT2LMHeadModel(config).eval().to(device, getattr(torch, dtype))
        for dtype in asked["dtypes"]
    }
    shape = asked["rows"], config.n_positions // 2
    tokens = torch.randint(config.vocab_size, shape, device=device)
    for line in sys.stdin:
        dtype, batch, prompt_tokens, new_tokens = json.loads(line)
        prompts = tokens[:batch, :prompt_tokens]
        start = time.perf_counter()
        with torch.inference_mode():
            texts = models[dtype].generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
            texts.cpu()  # waits for the device
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()

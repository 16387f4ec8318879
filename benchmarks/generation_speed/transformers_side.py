# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0"]
# ///
"""A side of `generation_speed.py`: GPT-2's shape in `transformers`, with random weights.

Reads lines of JSON, [dtype, batch, tokens of the prompt, new tokens], and answers each with the
seconds of one greedy generation.
"""

import json
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    rows = int(sys.argv[1])
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    models = {"float32": model, "bfloat16": GPT2LMHeadModel(GPT2Config()).eval().bfloat16()}
    tokens = torch.randint(model.config.vocab_size, (rows, model.config.n_positions // 2))
    for line in sys.stdin:
        dtype, batch, prompt_tokens, new_tokens = json.loads(line)
        prompts = tokens[:batch, :prompt_tokens]
        start = time.perf_counter()
        with torch.inference_mode():
            models[dtype].generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()

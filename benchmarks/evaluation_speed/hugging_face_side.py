# /// script
# requires-python = ">=3.11"
# dependencies = ["lm-eval==0.4.13", "torch==2.13.0", "transformers==5.23.0", "accelerate"]
# ///
"""A side of `harness_speed.py`: the lm-evaluation-harness's Hugging Face backend.

Reads the requests, then answers each line with the seconds that they took.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    tokenizer = Path(__file__).parents[2] / "tests" / "fixtures" / "tokenizers" / "gpt2"
    with contextlib.redirect_stdout(sys.stderr):
        model = HFLM(
            pretrained=GPT2LMHeadModel(GPT2Config(n_layer=asked["layers"])).eval(),
            tokenizer=AutoTokenizer.from_pretrained(tokenizer),
            batch_size=asked["batch_size"],
            device="cpu",
        )
    requests = [(("", ""), context, choice) for context, choice in asked["requests"]]
    print(seconds_of(model, requests), flush=True)
    for _ in sys.stdin:
        print(seconds_of(model, requests), flush=True)


def seconds_of(model: HFLM, requests: list) -> float:
    begin = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        model._loglikelihood_tokens(requests, disable_tqdm=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

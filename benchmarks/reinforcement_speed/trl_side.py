# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "trl==1.16.0"]
# ///
"""A side of `step_speed.py`: TRL's GRPOTrainer on the same model, prompts and step.

Reads a line before each step and answers it with the seconds of the step.
"""

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

answers_to = sys.stdout
sys.stdout = sys.stderr  # libraries print


class StepClock(TrainerCallback):
    """Waits for a line before each step, and answers it after the step."""

    def __init__(self, rewards: list[float]) -> None:
        self._start, self._rewards = 0.0, rewards

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        self._rewards.clear()
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        answer = [time.perf_counter() - self._start, sum(self._rewards) / len(self._rewards)]
        print(json.dumps(answer), file=answers_to, flush=True)


def main() -> None:
    folder, text = sys.argv[1:]
    settings = json.loads(text)
    torch.set_num_threads(settings["threads"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.padding_side = "left"
    seen: list[float] = []

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        found = [float(text.rpartition("=")[2] == right and "=" in text) for text, right in pairs]
        seen.extend(found)
        return found

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=settings["microbatch_size"],
            gradient_accumulation_steps=settings["microbatches"],
            num_generations=settings["samples"],
            max_completion_length=settings["new_tokens"],
            max_steps=settings["steps"],
            learning_rate=settings["learning_rate"],
            temperature=1.0,
            beta=0.0,
            loss_type="dr_grpo",
            scale_rewards="none",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            shuffle_dataset=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(settings["items"]),
            processing_class=tokenizer,
            callbacks=[StepClock(seen)],
        )
        trainer.train()


if __name__ == "__main__":
    main()

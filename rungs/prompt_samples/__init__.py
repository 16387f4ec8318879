"""Completions of a run's `sample_prompts` by its model, at each checkpoint.

    sampler  the program that samples from each new checkpoint, on the CPU beside training

The texts are in `samples.jsonl`; `rungs/run/records.py` describes and reads them.

Imports `common`, `config`, `data`, `run`, `parallel`, `model` and `checkpointing`."""

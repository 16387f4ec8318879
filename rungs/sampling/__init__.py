"""What a model says to the `sample_prompts` of its run, at each checkpoint.

    prompts          the prompts as token ids, checked before training begins
    sampler          the program that samples: it loads each checkpoint, on the CPU
    sample_process   that program beside training, told of each new checkpoint

The texts are in `samples.jsonl`; `rungs/run/samples.py` describes and reads them.

Imports `common`, `config`, `data`, `run`, `parallel`, `model` and `checkpointing`.
"""

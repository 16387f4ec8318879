"""A-to-A on 92.16 million tokens: `runs/a-to-a-fineweb`, from its first command to its last chart.

The tokens are random: what has to be copied makes no difference to the work.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_parts import committed_run, random_dataset
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from rungs.run import metrics

TOKENS = 92_160_000
REHEARSAL_TOKENS = 24_576
GOAL = "goal: 120 s; the text this run is from took 843 s on an RTX 3090"


def figures(setting: Setting) -> Iterator[Figure]:
    tokens = REHEARSAL_TOKENS if setting.rehearse else TOKENS
    small = {"vocab_size": 512, "emb_dim": 32, "context_length": 64}
    with tempfile.TemporaryDirectory() as folder:
        changes = {"dataset": random_dataset.NAME, "min_train_tokens": tokens}
        run = committed_run.copy(
            "a-to-a-fineweb", Path(folder), changes, small if setting.rehearse else {}
        )
        vocab = small["vocab_size"] if setting.rehearse else 50_257
        random_dataset.write(Path(folder) / "datasets", vocab, tokens + 1, tokens // 100)
        begin = time.perf_counter()
        committed_run.train(run)
        yield Figure("all of it", [time.perf_counter() - begin], "s", GOAL)
        steps = metrics.read(run / "metrics.jsonl")
    yield Figure(
        "loss of the last step", [steps[-1].train_loss or 0.0], "nats", f"{len(steps)} steps"
    )
    rates = [step.tokens_per_second for step in steps[len(steps) // 2 :]]
    yield Figure("training", rates, "tokens/s")

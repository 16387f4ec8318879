"""A run that is killed and resumed beside one that is not, bit for bit."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_parts import committed_run, random_dataset
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import ROOT, Setting
from rungs.config.run_config import load_run

KILLS = 2
TOKENS = 400_000
TINY = {"emb_dim": 32, "n_layers": 2, "n_heads": 2}


def figures(setting: Setting) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        train = {"deterministic": True, "dataset": random_dataset.NAME}
        model = TINY if setting.rehearse else {}
        run = committed_run.copy("layers", Path(folder), train, model)
        datasets = Path(folder) / "datasets"
        vocab = load_run(run).model.vocab_size
        random_dataset.write(datasets, vocab, TOKENS, TOKENS // 4)
        kills = 1 if setting.rehearse else KILLS
        check = ROOT / "smoke_tests/test_resume.py"
        done = subprocess.run(
            [
                sys.executable,
                str(check),
                str(run),
                "--kills",
                f"{kills}",
                "--datasets-dir",
                datasets,
            ],
            capture_output=True,
            text=True,
        )
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    problem = f"exit code {done.returncode}: {lines[-1]}" if done.returncode else ""
    note = "identical: weights, optimizer, data order, metrics" if not done.returncode else ""
    yield Figure(f"runs/layers, {kills} kill{'s' if kills > 1 else ''}", [], "", note, problem)

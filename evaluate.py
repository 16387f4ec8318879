"""Print what a checkpoint is worth: `uv run evaluate.py runs/a-to-a`.

Its loss, perplexity and bits per byte or, with --choices or --tasks, its scores on benchmarks.
"""

from rungs.cli import run

if __name__ == "__main__":
    run("evaluate")

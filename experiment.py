"""Conduct an experiment: `uv run experiment.py experiments/qk-norm`.

Trains the runs that `experiment.json` calls for, and says which variants are better. Exit codes: 0
done; 1 a run failed; 2 bad input; 128 + the number of a signal.
"""

from rungs.cli import run

if __name__ == "__main__":
    run("experiment")

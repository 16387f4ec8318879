"""Train a run, or resume it where it stopped: `uv run train.py runs/a-to-a`.

Exit codes: 0 finished; 2 bad input, nothing was changed; 128 + the number of a signal that
stopped it, saved if a step had been taken: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for
SIGHUP, 138, 140 and 152 for SIGUSR1, SIGUSR2 and SIGXCPU; 1 anything else.
"""

from rungs.cli import run

if __name__ == "__main__":
    run("train")

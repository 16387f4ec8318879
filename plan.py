"""Show what a run needs before you start it: `uv run plan.py runs/layers --device h100`.

Or propose the best runs for a compute budget: `uv run plan.py runs/layers --ladder 1e15`.

Exit codes: 0 it fits; 1 it does not fit into memory or on the disk; 2 bad input. Trains nothing,
and writes nothing except the run folders of --into.
"""

from rungs.cli import run

if __name__ == "__main__":
    run("plan")

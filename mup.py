"""Does a run's learning rate carry over to wider models?

    uv run mup.py check runs/mup      train a few steps at several widths

An experiment of kind "grid" with "widths" tries learning rates.
"""

from rungs.cli import run

if __name__ == "__main__":
    run("mup")

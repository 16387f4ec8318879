"""Does a run's learning rate carry over to wider models?

    uv run mup.py check runs/mup                      train a few steps at several widths
    uv run mup.py sweep runs/mup --learning-rates …   train small runs to the end

The experiments are in `rungs/planning/mup.py` and `rungs/cli/grid.py`.
"""

from rungs.cli import run

if __name__ == "__main__":
    run("mup")

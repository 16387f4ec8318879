"""Draw the charts of a run, or compare several runs.

uv run charts.py runs/a             draw the charts of one run again
uv run charts.py runs/a runs/b …    compare runs: charts under comparisons/, tables printed
uv run charts.py --power-law …      also fit a power law of loss against compute to the runs
uv run charts.py … --page FILE      one HTML page to look at runs and compare them, without network
uv run charts.py … --watch          the same page on 127.0.0.1, with new steps as the runs train
uv run charts.py --table csv runs/a …  a table: Markdown, LaTeX or CSV; seeds share a row
uv run charts.py runs/a --samples   what the run said to its sample_prompts, at each checkpoint
"""

from rungs.cli import run

if __name__ == "__main__":
    run("charts")

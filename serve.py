"""Answer over HTTP in the format of OpenAI's API, with a page to try models at /.

uv run serve.py runs/layers              on http://127.0.0.1:8000
uv run serve.py runs/a runs/b            two models; the page shows their answers side by side
uv run serve.py runs/a --follow          with the newest checkpoint while the run trains
"""

from rungs.cli import run

if __name__ == "__main__":
    run("serve")

"""Answer over HTTP in the format of OpenAI's API, with a page to try models at /.

uv run serve.py runs/layers              on http://127.0.0.1:8000
uv run serve.py runs/a runs/b            two models; the page shows their answers side by side
uv run serve.py runs/a --follow          with the newest checkpoint while the run trains
"""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from pathlib import Path
from typing import Any

import click

from rungs.commands.options import FiniteRange


@click.command()
@click.argument("models", metavar="RUN_OR_CHECKPOINT...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 for a free one.",
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the key that clients must send; needed unless --host is this machine.",
)
@click.option(
    "--rows",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    help="Texts per model at a time; others wait.",
)
@click.option(
    "--most-waiting",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Texts that may wait; more are refused.",
)
@click.option(
    "--most-tokens", type=click.IntRange(1), help="New tokens per text.  [default: what fits]"
)
@click.option(
    "--most-seconds",
    type=FiniteRange(1),
    default=300.0,
    show_default=True,
    help="Time for an answer.",
)
@click.option("--follow", is_flag=True, help="Use each new checkpoint of the RUNS as it is saved.")
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A chat template in Jinja.  [default: each model's own]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Dtype of matrices and activations. Default: float32 on a CPU, else bfloat16.",
)
@click.option(
    "--weights",
    "weight_format",
    type=click.Choice(["int8", "ema"]),
    help="int8: round matrices to 8 bits. ema: averaged weights.  [default: neither]",
)
def main(**options: Any) -> None:
    """Serve the models of one or several RUNS or checkpoints."""
    with importing():
        from rungs.commands.serve import serve
    serve(**options)


if __name__ == "__main__":
    run_command(main)

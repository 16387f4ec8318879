"""Answer over HTTP, until a signal."""

from rungs.common.command import importing

import threading
import time
from pathlib import Path
from typing import Literal

import click

from rungs.cli.options import DTYPE_OPTION, FiniteRange
from rungs.common.errors import UserError
from rungs.config.option_values import CHAT_TEMPLATES

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_SHORTEST_KEY = 16


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
    help=f"File in Jinja, or {CHAT_TEMPLATES}.  [default: each model's own]",
)
@DTYPE_OPTION
@click.option(
    "--weights",
    "weight_format",
    type=click.Choice(["int8", "ema"]),
    help="int8: round matrices to 8 bits. ema: averaged weights.  [default: neither]",
)
def main(
    models: tuple[str, ...],
    host: str,
    port: int,
    key_file: Path | None,
    rows: int,
    most_waiting: int,
    most_tokens: int | None,
    most_seconds: float,
    follow: bool,
    chat_template: Path | None,
    dtype: str | None,
    weight_format: Literal["int8", "ema"] | None,
) -> None:
    """Serve the models of one or several RUNS or checkpoints."""
    key = _read_key(key_file)
    if key is None and host not in LOOPBACK:
        raise UserError("--host: other machines may call it; add --key-file FILE with a key")
    click.echo("loading; Ctrl-C ends it at once", err=True)
    with importing():
        from rungs.parallel import jax_setup
        from rungs.serving.app import App, Limits, answer_until_signal, listen
        from rungs.serving.engine import Engine
        from rungs.serving.served import Loading, Served, names_of
        from rungs.serving.served import follow as follow_runs
    jax_setup.enable_compilation_cache()
    loading = Loading(follow, chat_template, dtype, weight_format)
    named = zip(names_of(models), models, strict=True)
    served = {name: Served(place, loading) for name, place in named}
    listener = listen(host, port)
    engine = Engine({name: model.load() for name, model in served.items()}, rows, most_waiting)
    click.echo("compiling, which takes seconds, of a large model minutes", err=True)
    began = time.perf_counter()
    engine.warm_up()
    click.echo(f"compiled in {time.perf_counter() - began:.1f} s", err=True)
    if follow:
        threading.Thread(target=follow_runs, args=(engine, served), daemon=True).start()
    limits = Limits(answer_seconds=most_seconds, new_tokens=most_tokens, texts=rows)
    hosts = [*LOOPBACK] if key is None else None
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"http://{shown}:{listener.getsockname()[1]}/ answers for {', '.join(served)}")
    click.echo("Ctrl-C lets answers end; a second Ctrl-C doesn't wait for them", err=True)
    answer_until_signal(App(served, engine, limits, key, hosts), engine, listener)


def _read_key(file: Path | None) -> str | None:
    """Return the key in a file. Raises UserError if it can't be read, is too short or not printable
    ASCII."""
    if file is None:
        return None

    from rungs.common.strict_json import read_text

    key = read_text(file).strip()
    if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable():
        raise UserError(
            f"{file}: must hold a key of at least {_SHORTEST_KEY} printable ASCII characters"
        )
    return key

"""Measure on an NVIDIA GPU, in a few minutes, what matters most.

    uv run --extra cuda benchmarks/on_a_gpu.py --minutes 9
    python3 benchmarks/on_a_gpu.py         # in an environment with JAX, Flax, Optax, Orbax, PyTorch
    uv run benchmarks/on_a_gpu.py --rehearse                                   # on a CPU, all of it

The parts are measured in order of worth, each in a process of its own, until time is up; what
does not fit is skipped. Every figure goes at once into a file, JSON with a table beside it, that
the next call continues. `--only` chooses parts. `--variant` compares variants of GPT-2's step in
one process, taking turns: a name, keys of train.json and flags of XLA (`remat=none`,
`xla_gpu_enable_cublaslt=true`), or the folder of another checkout.

`benchmarks/generated_tables.py` writes the tables of the docs from the file.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # it need not be installed

from rungs.common.command import run_command  # noqa: E402

import click  # noqa: E402

from benchmarks.gpu_parts import needs  # noqa: E402
from benchmarks.gpu_parts.parts import PARTS, VARIANTS, Part  # noqa: E402

MINUTES = 9.0
RESULTS = ROOT / "benchmarks/gpu_results"


@click.command()
@click.option(
    "--minutes",
    default=MINUTES,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Stop after this time.",
)
@click.option("--rehearse", is_flag=True, help="On a CPU, with tiny shapes, each part once.")
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="May be repeated.")
@click.option("--variant", "variants", multiple=True, metavar="VARIANT", help="May be repeated.")
@click.option(
    "--race",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where `racing/make_dataset.py --datasets-dir` made the dataset of the race.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    help="The file to write or to continue; or a folder, for one named after device, versions and"
    " code.  [default: benchmarks/gpu_results/]",
)
@click.option("--fresh", is_flag=True, help="Measure everything again, instead of continuing.")
@click.option("--torch-python", help="A Python with torch and transformers, if this one has none.")
@click.option("--without-torch", is_flag=True, help="Compare with nothing.")
@click.option("--needs", "list_needs", is_flag=True, help="List what has to be installed, and end.")
def main(
    minutes: float,
    rehearse: bool,
    only: tuple[str, ...],
    variants: tuple[str, ...],
    race: Path | None,
    into: Path | None,
    fresh: bool,
    torch_python: str | None,
    without_torch: bool,
    list_needs: bool,
) -> None:
    """Measure kernels, steps, generation, reinforcement learning, checkpoints and starts."""
    end = time.monotonic() + 60 * minutes
    if list_needs:
        click.echo("\n".join(needs.requirements()))
        return
    if absent := needs.missing():
        raise click.UsageError(
            f"not installed: {', '.join(absent)}; --needs lists all, with versions"
        )
    # These need what --needs lists.
    from benchmarks.gpu_parts.results import Results
    from benchmarks.gpu_parts.session import measure
    from benchmarks.gpu_parts.setting import Setting, find_torch
    from benchmarks.gpu_parts.step_variants import check

    parts = choose(only, variants, can_race=rehearse or race is not None)
    check(variants)
    torch = find_torch(torch_python, rehearse, without_torch)
    results = Results.open(into or RESULTS, rehearse, fresh, torch.versions)
    setting = Setting(
        rehearse, torch.command, list(variants), str(race.resolve()) if race else None
    )
    click.echo(f"{results.headline}\n{results.path}")
    measure(results, parts, setting, end)
    report(results.path, results.problems, results.missing(parts))


def choose(only: tuple[str, ...], variants: tuple[str, ...], can_race: bool) -> dict[str, Part]:
    """Return the parts to measure, by the name under which the results have them; variants alone
    if only they are asked for.

    Raises:
        UsageError: a race is asked for by name, and there is no dataset for it.
    """
    parts = {name: part for name, part in PARTS.items() if name in only or not (only or variants)}
    if "race" in only and not can_race:
        raise click.UsageError("--only race: name the folder of its dataset with --race")
    if not can_race:
        parts = {name: part for name, part in parts.items() if name != "race"}
    if variants:
        parts[f"variants: {'; '.join(variants)}"] = VARIANTS
    return parts


def report(path: Path, problems: list[str], missing: list[str]) -> None:
    """Say what is wrong and what is missing; exit with code 1 if something is wrong."""
    click.echo(f"\n{path} and {path.with_suffix('.txt')} have all figures")
    if missing:
        click.echo(f"not measured yet: {', '.join(missing)}; run the same command again")
    for problem in problems:
        click.echo(f"wrong: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    run_command(main)

"""Import, export and upload Hugging Face models."""

from rungs.common.command import importing

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from rungs.cli.options import DATASETS_DIR_OPTION, WEIGHTS_OPTION
from rungs.common.errors import RunFailure, UserError
from rungs.common.shown_text import command_line, quoted
from rungs.config.option_values import GGUFDtype

if TYPE_CHECKING:
    from rungs.config.model_config import ModelConfig
    from rungs.huggingface.exporting import Export
    from rungs.huggingface.model_card import ModelCard
    from rungs.run.folder import RunFolder

EXIT_DIVERGED = 1
MAX_EXAMPLE_TOKENS = 1024
DEFAULT_DTYPE = "f16"


@click.group()
def main() -> None:
    """Import models from the Hugging Face hub, export models for transformers, and upload them."""


@main.command("import")
@click.argument("source", metavar="HUB_ID_OR_FOLDER")
@click.argument("run")
@click.option("--revision", metavar="NAME", help="A branch, tag or commit on the hub.")
@click.option(
    "--check",
    is_flag=True,
    help="Compare every layer with transformers, and import only if they agree.",
)
@click.option(
    "--python",
    metavar="PATH",
    help="With --check: a Python that has PyTorch and transformers.  [default: this one]",
)
@click.option(
    "--ignore-key",
    "ignored_keys",
    metavar="KEY",
    multiple=True,
    help="Ignore this key of config.json. Only for keys that do not change what the model"
    " computes. Can be repeated.",
)
def import_(
    source: str,
    run: str,
    revision: str | None,
    check: bool,
    python: str | None,
    ignored_keys: tuple[str, ...],
) -> None:
    """Create the run folder RUN (a path, or a name under runs/) from a Hugging Face model, given by
    its hub id or its folder, from a GGUF file, or from a run folder of jax-gpt2-from-scratch."""
    with importing():
        from rungs.huggingface import importing as imports
        from rungs.huggingface.gguf.reading import is_gguf
        from rungs.huggingface.transformers_check import (
            DivergenceError,
            compare,
            require_transformers,
        )

    target = imports.target_folder(run)
    if python and not check:
        raise UserError("--python: is for --check; add it, or leave out --python")
    if check and is_gguf(Path(source)):
        raise UserError("--check: is for Hugging Face models; leave it out for a GGUF file")
    if check:
        require_transformers(python or sys.executable)
    plan = imports.Import.from_source(imports.find_source(source, revision), ignored_keys)
    click.echo(plan.summary())
    for note in plan.match.notes:
        click.echo(note)

    def compare_if_asked(imported: "RunFolder") -> None:
        if check:
            compare(plan.source.folder, imported.imported, python or sys.executable, click.echo)

    try:
        notes = imports.import_model(plan, target, compare_if_asked)
    except DivergenceError as error:
        click.echo(f"error: {error}; {target} was not created", err=True)
        sys.exit(EXIT_DIVERGED)
    for note in notes:
        click.echo(note)
    click.echo(f"{target}: imported")
    click.echo(how_to_fine_tune(target, plan.model))


@main.command()
@click.argument("checkpoint", metavar="RUN_OR_CHECKPOINT")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--adapter",
    is_flag=True,
    help="Write only the LoRA of the run, as an adapter for peft, instead of merging it.",
)
@click.option(
    "--jax-gpt2",
    is_flag=True,
    help="Write the weights for jax-gpt2-from-scratch instead, whose run folders import reads.",
)
@click.option(
    "--dtype",
    type=click.Choice(get_args(GGUFDtype)),
    help="The dtype of a GGUF file's matrices.  [default: f16]",
)
@WEIGHTS_OPTION
def export(
    checkpoint: str,
    folder: Path,
    adapter: bool,
    jax_gpt2: bool,
    dtype: str | None,
    averaged: str | None,
) -> None:
    """Write a model for transformers into the new folder FOLDER, or for llama.cpp into a new file
    whose name ends in .gguf.

    RUN_OR_CHECKPOINT is a checkpoint, a model.safetensors or a run folder. For a run folder, the
    best checkpoint is exported, or the imported model if there is no checkpoint.
    """
    with importing():
        from rungs.checkpointing.checkpoint_folder import find_averaged_weights
        from rungs.common import disk
        from rungs.huggingface import exporting, hf_tokenizer
        from rungs.huggingface.gguf.reading import SUFFIX as GGUF_SUFFIX

    as_gguf = folder.suffix.lower() == GGUF_SUFFIX
    if dtype and not as_gguf:
        raise UserError(f"--dtype: is for a GGUF file, whose name ends in {GGUF_SUFFIX}")
    if jax_gpt2 and (adapter or as_gguf):
        raise UserError("--jax-gpt2: is for a folder, without --adapter")
    if adapter and as_gguf:
        raise UserError(
            "--adapter: is for a folder; leave it out, and the file has the merged LoRA"
        )
    checkpoint = str(find_averaged_weights(checkpoint)) if averaged else checkpoint
    if folder.exists():
        raise UserError(f"{folder}: exists already; choose another name, or move it away")
    if adapter:
        export_adapter(checkpoint, folder)
        return
    if as_gguf:
        export_gguf(checkpoint, folder, dtype or DEFAULT_DTYPE)
        return
    if jax_gpt2:
        from rungs.huggingface import jax_gpt2 as other

        with disk.atomic_folder(folder) as partial:
            other.export(checkpoint, partial)
        click.echo(f"{folder}: written for jax-gpt2-from-scratch")
        return
    plan = exporting.Export(checkpoint)
    click.echo(plan.summary())
    with disk.atomic_folder(folder) as partial:
        notes = plan.write(partial)
    for note in notes:
        click.echo(note)
    click.echo(f"generation stops at {hf_tokenizer.describe_ends(folder)}")
    click.echo(f"{folder}: written. Load it: AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def export_gguf(checkpoint: str, path: Path, dtype: str) -> None:
    """Write a GGUF file, and print how to load it."""
    from rungs.common import disk
    from rungs.huggingface import exporting
    from rungs.huggingface.gguf.writing import GGUFExport

    plan = GGUFExport(exporting.Export(checkpoint), dtype)
    click.echo(plan.summary())
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.atomic_file(path) as partial:
        plan.write(partial, path.stem)
    for note in plan.notes:
        click.echo(note)
    click.echo(f"{path}: written. Try it with llama.cpp: llama-cli -m {quoted(path)}")


def export_adapter(checkpoint: str, folder: Path) -> None:
    """Write the LoRA weights of a checkpoint for peft, and print how to load them."""
    from rungs.common import disk
    from rungs.huggingface import exporting

    plan = exporting.Adapter(checkpoint)
    with disk.atomic_folder(folder) as partial:
        plan.write(partial)
    base = repr(plan.base) if plan.base_is_known else "BASE"
    click.echo(
        f"{folder}: written. Load it: PeftModel.from_pretrained("
        f"AutoModelForCausalLM.from_pretrained({base}), {str(folder)!r})"
    )
    if not plan.base_is_known:
        click.echo(f"for BASE give a folder or id with which transformers loads {plan.base}")


@main.command()
@click.argument("checkpoint", metavar="RUN_OR_CHECKPOINT")
@click.argument("name", metavar="OWNER/NAME")
@WEIGHTS_OPTION
@click.option(
    "--all-steps",
    is_flag=True,
    help="Upload every checkpoint of a run, too, each as a revision of its own, such as step1000.",
)
@click.option("--public", is_flag=True, help="Make a new repository public; private by default.")
@click.option(
    "--gguf",
    type=click.Choice(get_args(GGUFDtype)),
    help="Add a GGUF file of this dtype, for llama.cpp.",
)
@DATASETS_DIR_OPTION
def upload(
    checkpoint: str,
    name: str,
    all_steps: bool,
    public: bool,
    gguf: str | None,
    datasets_dir: Path | None,
    averaged: str | None,
) -> None:
    """Upload a model for transformers to the Hugging Face hub, with a model card.

    RUN_OR_CHECKPOINT is as for export. An earlier upload of the same name is replaced; the
    repository's history keeps it. Only what the hub lacks is sent; then the checksums that it lists
    are compared with the files here. Needs a login with `hf auth login`, or HF_TOKEN.
    """
    with importing():
        from rungs.checkpointing.checkpoint_folder import find_averaged_weights
        from rungs.common import hub
        from rungs.data.catalog import find_datasets_dir
        from rungs.huggingface import exporting, model_card

    hub.check_upload(name)
    places = (every_step(checkpoint) if all_steps else {}) | {hub.MAIN: checkpoint}
    datasets, wrong = find_datasets_dir(datasets_dir), list[str]()
    for revision, place in places.items():
        plan = exporting.Export(str(find_averaged_weights(place)) if averaged else place)
        click.echo(f"{revision}: {plan.summary()}")
        file_name = f"{name.partition('/')[2]}-{gguf}.gguf" if gguf else None
        card = model_card.ModelCard(name, revision, plan, datasets, file_name)
        with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=".") as folder:
            notes = write_upload(Path(folder), plan, card, gguf, file_name)
            address, differences = hub.upload_model(
                name, revision, Path(folder), is_private=not public
            )
        wrong += differences
    for note in notes:
        click.echo(note)
    if wrong:
        raise RunFailure("\n".join(wrong) + "\nthe hub has other files; run this again")
    click.echo(f"{address}: uploaded. Its card names no license; add one there")


def every_step(run: str) -> dict[str, str]:
    """Return the checkpoints of a run by the revisions that they become. Raises UserError if there
    is none, or one is damaged."""
    from rungs.checkpointing.checkpoint_folder import list_checkpoints, unusable_checkpoints
    from rungs.run.folder import RunFolder, find_run

    folder = RunFolder(find_run(run)).checkpoints
    for error in unusable_checkpoints(folder).values():
        raise error
    if found := {f"step{one.step}": str(one.folder) for one in list_checkpoints(folder)}:
        return found
    raise UserError(f"--all-steps: {run} has no checkpoints; name a run folder that has some")


def write_upload(
    folder: Path, plan: "Export", card: "ModelCard", gguf: str | None, file_name: str | None
) -> list[str]:
    """Write all files of an upload into a folder. Return notes on missing parts."""
    from rungs.huggingface.gguf.writing import GGUFExport

    file = GGUFExport(plan, gguf) if gguf else None
    notes = plan.write(folder)
    if file and file_name:
        file.write(folder / file_name, Path(file_name).stem)
        notes += [note for note in file.notes if note not in notes]
    card.write(folder)
    return notes


def how_to_fine_tune(target: Path, model: "ModelConfig") -> str:
    """Return the next two steps for a user who wants to train the imported model."""
    example = {
        "start_from": "imported",
        "dataset": "NAME",
        "sequence_length": min(model.context_length, MAX_EXAMPLE_TOKENS),
        "microbatch_size": 4,
        "learning_rate": 1e-5,
        "checkpoint_interval": 100,
    }
    folder = target / "checkpoints" / "imported"
    return (
        f"To fine-tune it: {command_line('download_dataset')} --text FILE --name NAME --tokenizer"
        f" {quoted(folder)}\nand write {target / 'train.json'}:\n"
        f"{json.dumps(example, indent=2)}"
    )

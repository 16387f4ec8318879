"""Import, export and upload Hugging Face models."""

import json
import sys
import tempfile
from pathlib import Path

import click

from rungs.checkpointing.checkpoint_folder import find_averaged_weights
from rungs.common import disk, hub, paths, shown_text
from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.config.option_values import LinenFamily
from rungs.data.catalog import find_datasets_dir
from rungs.huggingface import exporting, hf_tokenizer, importing, model_card
from rungs.huggingface.gguf.reading import SUFFIX as GGUF_SUFFIX
from rungs.huggingface.gguf.reading import is_gguf
from rungs.huggingface.gguf.writing import GGUFExport
from rungs.huggingface.transformers_check import DivergenceError, compare, require_transformers
from rungs.run.folder import RunFolder

EXIT_DIVERGED = 1
MAX_EXAMPLE_TOKENS = 1024
DEFAULT_DTYPE = "f16"


def import_(
    source: str,
    run: str,
    revision: str | None,
    check: bool,
    python: str | None,
    ignored_keys: tuple[str, ...],
    linen: LinenFamily | None,
) -> None:
    """Do what the options of `pretrained.py import` ask for."""
    if linen and (check or revision):
        raise UserError(
            "--linen: leave out --check and --revision, which are for Hugging Face models"
        )
    target = importing.target_folder(run)
    if python and not check:
        raise UserError("--python: is for --check; add it, or leave out --python")
    if check and is_gguf(Path(source)):
        raise UserError("--check: is for Hugging Face models; leave it out for a GGUF file")
    if check:
        require_transformers(python or sys.executable)
    found = (
        importing.find_linen_source(source, linen)
        if linen
        else importing.find_source(source, revision)
    )
    plan = importing.Import.from_source(found, ignored_keys)
    click.echo(plan.summary())
    for note in plan.match.notes:
        click.echo(note)

    def compare_if_asked(imported: RunFolder) -> None:
        if check:
            compare(plan.source.folder, imported.imported, python or sys.executable, click.echo)

    try:
        notes = importing.import_model(plan, target, compare_if_asked)
    except DivergenceError as error:
        click.echo(f"error: {error}; {target} was not created", err=True)
        sys.exit(EXIT_DIVERGED)
    for note in notes:
        click.echo(note)
    click.echo(f"{target}: imported")
    click.echo(how_to_fine_tune(target, plan.model))


def export(
    checkpoint: str, folder: Path, adapter: bool, dtype: str | None, averaged: str | None
) -> None:
    """Do what the options of `pretrained.py export` ask for."""
    as_gguf = paths.suffix_of(folder) == GGUF_SUFFIX
    if dtype and not as_gguf:
        raise UserError(f"--dtype: is for a GGUF file, whose name ends in {GGUF_SUFFIX}")
    if adapter and as_gguf:
        raise UserError(
            "--adapter: is for a folder; leave it out, and the file has the merged LoRA"
        )
    checkpoint = str(find_averaged_weights(checkpoint)) if averaged else checkpoint
    if paths.is_there(folder):
        raise UserError(f"{folder}: exists already; choose another name, or move it away")
    if adapter:
        export_adapter(checkpoint, folder)
        return
    if as_gguf:
        export_gguf(checkpoint, folder, dtype or DEFAULT_DTYPE)
        return
    plan = exporting.Export(checkpoint)
    click.echo(plan.summary())
    with disk.atomic_folder(folder) as partial:
        notes = plan.write(partial)
    for note in notes:
        click.echo(note)
    click.echo(f"generation stops at {hf_tokenizer.describe_ends(folder)}")
    click.echo(f"{folder}: written. Load it: AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def upload(
    checkpoint: str,
    name: str,
    public: bool,
    gguf: str | None,
    datasets_dir: Path | None,
    averaged: str | None,
) -> None:
    """Do what the options of `pretrained.py upload` ask for."""
    hub.check_upload(name)
    checkpoint = str(find_averaged_weights(checkpoint)) if averaged else checkpoint
    plan = exporting.Export(checkpoint)
    file = GGUFExport(plan, gguf) if gguf else None
    file_name = f"{name.partition('/')[2]}-{gguf}{GGUF_SUFFIX}" if gguf else None
    card = model_card.ModelCard(name, plan, find_datasets_dir(datasets_dir), file_name)
    click.echo(plan.summary())
    with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=".") as place:
        folder = Path(place)
        notes = plan.write(folder)
        if file and file_name:
            file.write(folder / file_name)
            notes = [*notes, *(note for note in file.notes if note not in notes)]
        card.write(folder)
        address = hub.upload_model(name, folder, is_private=not public)
    for note in notes:
        click.echo(note)
    click.echo(f"{address}: uploaded. Its card names no license; add one there")


def export_gguf(checkpoint: str, path: Path, dtype: str) -> None:
    """Write a GGUF file, and print how to load it."""
    plan = GGUFExport(exporting.Export(checkpoint), dtype)
    click.echo(plan.summary())
    with disk.atomic_file(path) as partial:
        plan.write(partial)
    for note in plan.notes:
        click.echo(note)
    click.echo(f"{path}: written. Try it with llama.cpp: llama-cli -m {shown_text.quoted(path)}")


def export_adapter(checkpoint: str, folder: Path) -> None:
    """Write the LoRA weights of a checkpoint for peft, and print how to load them."""
    plan = exporting.Adapter(checkpoint)
    with disk.atomic_folder(folder) as partial:
        plan.write(partial)
    base = repr(plan.base) if plan.base_is_known else "BASE"
    click.echo(
        f"{folder}: written. Load it: PeftModel.from_pretrained("
        f"AutoModelForCausalLM.from_pretrained({base}), {str(folder)!r})"
    )
    if not plan.base_is_known:
        click.echo(
            f"BASE is the folder of {plan.base}, from which the run started, for transformers"
        )


def how_to_fine_tune(target: Path, model: ModelConfig) -> str:
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
        "To fine-tune it: uv run download_dataset.py --text FILE --name NAME --tokenizer"
        f" {shown_text.quoted(folder)}\nand write {target / 'train.json'}:\n"
        f"{json.dumps(example, indent=2)}"
    )

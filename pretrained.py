"""Import, export and upload Hugging Face models: `uv run pretrained.py import ID_OR_FOLDER RUN`."""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from pathlib import Path
from typing import Any, get_args

import click

from rungs.commands.options import DATASETS_DIR_OPTION, WEIGHTS_OPTION
from rungs.config.option_values import GGUFDtype, LinenFamily


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
@click.option(
    "--linen",
    type=click.Choice(get_args(LinenFamily)),
    help="The source is a checkpoint of a Flax Linen model of this family, msgpack or Orbax.",
)
def import_(**options: Any) -> None:
    """Create the run folder RUN (a path, or a name under runs/) from a Hugging Face model, given by
    its hub id or its folder, from a GGUF file, or from a Linen checkpoint."""
    with importing():
        from rungs.commands.pretrained import import_
    import_(**options)


@main.command()
@click.argument("checkpoint", metavar="RUN_OR_CHECKPOINT")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--adapter",
    is_flag=True,
    help="Write only the LoRA of the run, as an adapter for peft, instead of merging it.",
)
@click.option(
    "--dtype",
    type=click.Choice(get_args(GGUFDtype)),
    help="The dtype of a GGUF file's matrices.  [default: f16]",
)
@WEIGHTS_OPTION
def export(**options: Any) -> None:
    """Write a model for transformers into the new folder FOLDER, or for llama.cpp into a new file
    whose name ends in .gguf.

    RUN_OR_CHECKPOINT is a checkpoint, a model.safetensors or a run folder. For a run folder, the
    best checkpoint is exported, or the imported model if there is no checkpoint.
    """
    with importing():
        from rungs.commands.pretrained import export
    export(**options)


@main.command()
@click.argument("checkpoint", metavar="RUN_OR_CHECKPOINT")
@click.argument("name", metavar="OWNER/NAME")
@WEIGHTS_OPTION
@click.option("--public", is_flag=True, help="Make a new repository public; private by default.")
@click.option(
    "--gguf",
    type=click.Choice(get_args(GGUFDtype)),
    help="Add a GGUF file of this dtype, for llama.cpp.",
)
@DATASETS_DIR_OPTION
def upload(**options: Any) -> None:
    """Upload a model for transformers to the Hugging Face hub, with a model card.

    RUN_OR_CHECKPOINT is as for export. An earlier upload of the same name is replaced; the
    repository's history keeps it. Needs a login with `hf auth login`, or HF_TOKEN.
    """
    with importing():
        from rungs.commands.pretrained import upload
    upload(**options)


if __name__ == "__main__":
    run_command(main)

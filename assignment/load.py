"""Bring a student's model into a run folder, to train, plot and sample it like any other:

    uv run assignment/load.py CHECKPOINT runs/mine
    uv run train.py runs/mine

CHECKPOINT is a file that `save_checkpoint` wrote, of a `TransformerLM`. Its weights are imported as
those of a Llama, which computes the same, with RoPE's pairs in another place. The optimizer's state
is not: training starts with a new one."""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

with importing():
    import numpy as np
    import safetensors.numpy
    from safetensors import SafetensorError, safe_open

    from rungs.common.errors import UserError, reason
    from rungs.common.paths import refuse_link_out
    from rungs.common.strict_json import format_name, format_value
    from rungs.data.text.tokenizer_files import TOKENIZER_FILES, load_tokenizer
    from rungs.huggingface.importing import HFSource, Import, import_model, target_folder
    from rungs.run.folder import RunFolder

EPS = 1e-5
"""The default of RMSNorm, which TransformerLM uses."""
CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "theta": "rope_theta",
}
"""What the checkpoint's config must have, by the names of Llama's `config.json`."""
TRAINING = {
    "start_from": "imported",
    "shuffle": True,
    "min_train_tokens": -1,
    "validation_tokens": 65_536,
    "microbatch_size": 8,
    "learning_rate": 3e-4,
    "warmup_period_percent": 10,
    "clipping_max_norm": 1.0,
    "checkpoint_interval": 250,
}
"""Keys of the new `train.json`, besides the dataset."""


class StudentModel(NamedTuple):
    """A model in a checkpoint, checked."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    """Arrays by path, such as `layers.0.MHA.Q_proj.weights`."""


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("run")
@click.option(
    "--tokenizer",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Where Tokenizer.save wrote the model's tokenizer, or any tokenizer that Rungs can read."
    " Without one, the model can be trained, and not sampled before.",
)
@click.option(
    "--dataset",
    metavar="NAME",
    default="python-stdlib",
    show_default=True,
    help="The dataset that train.json names.",
)
def main(**options: Any) -> None:
    """Create the run folder RUN (a path, or a name under runs/) from CHECKPOINT, a file that
    `save_checkpoint` of the assignment wrote."""
    load(**options)


def load(checkpoint: Path, run: str, tokenizer: Path | None, dataset: str) -> None:
    """Create a run folder. Raises UserError, and creates nothing, if the checkpoint or the
    tokenizer can't be read, or the folder exists."""
    target = target_folder(run)
    student = read_checkpoint(checkpoint)
    copied = tokenizer_files(tokenizer) if tokenizer else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_llama(student, folder)
        for path in copied:
            shutil.copyfile(path, folder / path.name)

        def add_train_config(new: RunFolder) -> None:
            text = json.dumps({"dataset": dataset} | TRAINING, indent=2) + "\n"
            new.path.joinpath("train.json").write_text(text, encoding="utf-8")

        try:
            plan = Import.from_source(HFSource(checkpoint.name, folder))
            notes = import_model(plan, target, add_train_config)
        except UserError as error:
            message = str(error)
            for path in (*folder.iterdir(), folder):
                message = message.replace(str(path), str(checkpoint))
            raise UserError(message) from None
    for note in notes:
        click.echo(note)
    click.echo(f"{target}: imported, to train on {dataset}: uv run train.py {target}")


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer in a folder. Raises UserError if Rungs can't read it, or
    one is a link out of the folder, as they are copied."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one that Tokenizer.save wrote")
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for path in found:
        refuse_link_out(path)
    load_tokenizer(folder)
    return found


def read_checkpoint(path: Path) -> StudentModel:
    """Return the model in a checkpoint. Raises UserError if it can't be read, or isn't that of a
    TransformerLM."""
    if not path.exists():
        raise UserError(f"{path}: no such file; give one that save_checkpoint wrote")
    if not path.is_file():
        raise UserError(f"{path}: not a file; give one that save_checkpoint wrote")
    try:
        with safe_open(path, framework="numpy") as file:
            config = json.loads((file.metadata() or {}).get("config", "{}"))
            names = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118
            weights = {name.removeprefix("model."): file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: not a checkpoint that save_checkpoint wrote: {reason(error)}"
        ) from None
    if problem := config_problem(config) or weights_problem(config, weights):
        raise UserError(f"{path}: not a checkpoint of a TransformerLM: {problem}")
    return StudentModel(config, weights)


def config_problem(config: Any) -> str | None:
    """Return what a checkpoint's config lacks; None if it is complete."""
    if not isinstance(config, dict):
        return "its config is not an object"
    for key in CONFIG_KEYS:
        if key not in config:
            return f"its config has no {key}"
        value, shown = config[key], format_value(config[key])
        if not isinstance(value, int | float) or value <= 0:
            return f"its config has {key} {shown}, which must be a positive number"
        if key != "theta" and not isinstance(value, int):
            return f"its config has {key} {shown}, which must be a whole number"
    if config["d_model"] % (2 * config["num_heads"]):
        return "d_model is not num_heads times an even number"
    return None


def weights_problem(config: dict[str, Any], weights: dict[str, np.ndarray]) -> str | None:
    """Return a difference between a checkpoint's weights and those of its config; None if there is
    none."""
    unknown = {*weights}
    for name, shape in expected_shapes(config):
        if name not in weights:
            return f"{name} is missing"
        if weights[name].shape != shape:
            return f"{name} has shape {weights[name].shape}, must have {shape}"
        if weights[name].dtype.name not in ("float32", "float16", "bfloat16"):
            return f"{name} is {weights[name].dtype.name}, must be float32, float16 or bfloat16"
        unknown.remove(name)
    return f"{format_name(min(unknown))} is unknown" if unknown else None


def expected_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the path and the shape of each weight of a TransformerLM. A config can claim any number
    of layers."""
    vocab, width, hidden = config["vocab_size"], config["d_model"], config["d_ff"]
    layer = {
        **{f"MHA.{name}_proj": (width, width) for name in "QKVO"},
        **{"SwiGLU.w1": (width, hidden), "SwiGLU.w2": (hidden, width)},
        **{"SwiGLU.w3": (width, hidden), "RMSNorm1": (width,), "RMSNorm2": (width,)},
    }
    yield "token_embeddings.weights", (vocab, width)
    yield "ln1.weights", (width,)
    yield "linear.weights", (width, vocab)
    for number in range(config["num_layers"]):
        for name, shape in layer.items():
            yield f"layers.{number}.{name}.weights", shape


def write_llama(student: StudentModel, folder: Path) -> None:
    """Write a model as a Llama of Hugging Face, `config.json` and `model.safetensors`."""
    config = {theirs: student.config[ours] for ours, theirs in CONFIG_KEYS.items()}
    config |= {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": student.config["num_heads"],
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    folder.joinpath("config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = llama_tensors(student)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def llama_tensors(student: StudentModel) -> dict[str, np.ndarray]:
    """Return the tensors of a Llama, whose matrices are (outputs, inputs), by their names."""
    weights, num_heads = student.weights, student.config["num_heads"]
    tensors = {
        "model.embed_tokens.weight": weights["token_embeddings.weights"],
        "model.norm.weight": weights["ln1.weights"],
        "lm_head.weight": weights["linear.weights"].T,
    }
    for number in range(student.config["num_layers"]):
        ours, theirs = f"layers.{number}", f"model.layers.{number}"
        for name in "QK":
            matrix = halves_from_pairs(weights[f"{ours}.MHA.{name}_proj.weights"], num_heads)
            tensors[f"{theirs}.self_attn.{name.lower()}_proj.weight"] = matrix.T
        for name in "VO":
            matrix = weights[f"{ours}.MHA.{name}_proj.weights"]
            tensors[f"{theirs}.self_attn.{name.lower()}_proj.weight"] = matrix.T
        for name, hf_name in {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.items():
            tensors[f"{theirs}.mlp.{hf_name}.weight"] = weights[f"{ours}.SwiGLU.{name}.weights"].T
        for name, hf_name in {
            "RMSNorm1": "input_layernorm",
            "RMSNorm2": "post_attention_layernorm",
        }.items():
            tensors[f"{theirs}.{hf_name}.weight"] = weights[f"{ours}.{name}.weights"]
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def halves_from_pairs(weights_DD: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the outputs of each head for RoPE that turns channels i and i + H / 2 together, as
    Llama's does on the hub and here, instead of 2i and 2i + 1. If queries and keys are reordered
    alike, their products stay the same."""
    width = len(weights_DD)
    pairs = weights_DD.reshape(width, num_heads, width // num_heads // 2, 2)
    return pairs.swapaxes(-1, -2).reshape(width, width)


if __name__ == "__main__":
    run_command(main)

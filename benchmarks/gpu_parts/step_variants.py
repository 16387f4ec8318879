"""Named variants of GPT-2's step.

A variant is what it changes of `runs/gpt2-small`: keys of `train.json`, and flags of XLA (`xla_…`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import click

from benchmarks.gpu_parts.setting import ROOT, Setting
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig, check_texts, load_run
from rungs.config.train_config import TrainConfig

COMMITTED = "runs/gpt2-small"
SEQUENCES = 96
"""Of a step, of all variants that have microbatches of another size."""
Changes = dict[str, Any]
VARIANTS: dict[str, Changes] = {
    COMMITTED: {},
    **{f"microbatches of {size}": {"microbatch_size": size} for size in (8, 32)},
    "logits in float32": {"logits_dtype": "float32"},
    "layers in a loop": {"scan_unroll": 1},
    "remat none": {"remat": "none"},
    "remat dots": {"remat": "dots"},
    "remat full": {"remat": "full"},
    **{
        f"attention: {kernel}": {"attention_kernel": kernel}
        for kernel in ("cudnn", "mosaic", "triton", "blockwise")
    },
    "Q, K and V merged": {"xla_gpu_dot_merger_threshold_mb": 32},
    "no Triton matmuls": {"xla_gpu_enable_triton_gemm": False},
    "cublasLt": {"xla_gpu_enable_cublaslt": True},
    "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
TINY = {"vocab_size": 512, "context_length": 64, "emb_dim": 64, "n_layers": 2, "n_heads": 2}
"""Of a rehearsal, whose microbatches are an eighth as large."""


def parse_variant(text: str) -> tuple[Path, Changes]:
    """Return the checkout whose code a variant has, and what it changes.

    Args:
        text: a name, or changes, as `key=value,key=value`; before them, or alone, the folder of
            another checkout, which has a `runs/gpt2-small` of its own.

    Raises:
        UsageError: it is none of these.
    """
    if text in VARIANTS:
        return ROOT, VARIANTS[text]
    folder, _, keys = text.partition(",")
    checkout = Path(folder).resolve()
    if not (checkout / "rungs" / "__init__.py").exists():
        checkout, keys = ROOT, text
    pairs = [pair.partition("=") for pair in keys.split(",") if keys]
    if not text or not all(key and equals for key, equals, _ in pairs):
        raise click.UsageError(
            f"--variant {text}: not one of {', '.join(VARIANTS)}, nor the folder of a checkout, nor"
            " key=value"
        )
    return checkout, {key.strip(): _value(value) for key, _, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def config_of(changes: Changes, setting: Setting, checkout: Path = ROOT) -> RunConfig:
    """Return a variant's run on one device.

    Raises:
        UserError: a key is unknown, or a value is not valid.
    """
    run = load_run(checkout / COMMITTED)
    keys = {key: value for key, value in changes.items() if not key.startswith("xla_")}
    if "microbatch_size" in keys:
        keys["gradient_accumulation_steps"] = SEQUENCES // keys["microbatch_size"]
    model, train = run.model.as_json(), run.train.as_json() | keys
    if setting.rehearse:
        model |= TINY
        train["microbatch_size"] = max(train["microbatch_size"] // 8, 1)
        train["attention_kernel"] = "auto"  # a CPU has none of the others
    train["sharding"] = {"mode": "dp", "data": 1}
    texts = {MODEL_FILE: json.dumps(model), TRAIN_FILE: json.dumps(train)}
    checked = check_texts(COMMITTED, texts)
    return RunConfig(checked.model, cast(TrainConfig, checked.train))


def compiler_options(changes: Changes) -> Changes:
    return {key: value for key, value in changes.items() if key.startswith("xla_")}


def check(variants: Sequence[str]) -> None:
    """Raise UsageError or UserError if one of some variants can't be."""
    for variant in variants:
        checkout, changes = parse_variant(variant)
        if checkout == ROOT:
            config_of(changes, Setting(rehearse=False, torch=None, variants=[]))

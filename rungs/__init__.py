"""Rungs trains, compares, looks into and serves language models in JAX, from run folders.

    import rungs
    model = rungs.load_model("runs/layers")   # model(tokens_BS) returns logits_BSV
    generator = rungs.load_generator("runs/layers")  # generator.continue_texts(["def "], 40)
    config = rungs.load_run("runs/layers")    # reads and checks model.json and train.json

The docstring of each package lists its files. From the bottom up (a package imports only those
before it; `uv run lint-imports` checks the layers in `pyproject.toml`):

    common         errors, files, JSON, logging
    config         model.json, train.json and reinforce.json
    tasks          prompts with answers, and the verifiers that reward completions
    run            run folders and their metrics
    data           tokenizers, datasets, batches
    parallel       meshes, sharding modes, collectives, processes
    model          the decoder, its kernels, generation
    optim          optimizers, schedules, precision
    step           the compiled training and evaluation steps
    inspect        watch: what each layer does over training; look: what it does with one text
    checkpointing  checkpoints and weight files
    objectives     what a run minimizes: next-token, preferences, distillation, policy
    planning       forecasts of memory, FLOPs and time; ladders, power laws, muP
    huggingface    import and export of published models
    integrations   beside a run: a mirror, experiment trackers, hooks, restarts after a crash
    evaluation     scores on benchmarks; completions of a run's sample prompts
    training       starting, the training loop, resuming, failed steps
    reinforcement  reinforcement learning: sampling, rewards, its loop
    checks         the checks that `smoke_tests/` at the root runs on a machine or a run
    report         charts as PNGs, HTML pages of runs and of what a model does
    serving        models over HTTP in the format of OpenAI's API, and a page to try them
    experiments    several runs and a verdict
    cli            the commands, such as `rungs train` and `train.py`
    __main__       `rungs` and `python -m rungs`

The names below are imported when first used, so `import rungs` itself is fast."""

import importlib
from typing import TYPE_CHECKING, Any

from rungs.common.namesake import refuse_namesake

if TYPE_CHECKING:
    from rungs.checkpointing.load import TextGenerator, load_generator, load_model, load_tokenizer
    from rungs.common.errors import RunFailure, UserError
    from rungs.config.model_config import ModelConfig
    from rungs.config.run_config import RunConfig, load_run
    from rungs.config.train_config import TrainConfig
    from rungs.data.catalog import open_dataset
    from rungs.data.text.tokenizer import Tokenizer
    from rungs.inspect.look import Look, look
    from rungs.inspect.patch import patch
    from rungs.model.generation import Generator, Request
    from rungs.model.gpt import GPT
    from rungs.model.sampling import Sampling
    from rungs.run.recorded_run import RecordedRun

refuse_namesake()

_MODULES = {
    "GPT": "model.gpt",
    "Generator": "model.generation",
    "Look": "inspect.look",
    "ModelConfig": "config.model_config",
    "RecordedRun": "run.recorded_run",
    "Request": "model.generation",
    "RunConfig": "config.run_config",
    "RunFailure": "common.errors",
    "Sampling": "model.sampling",
    "Tokenizer": "data.text.tokenizer",
    "TextGenerator": "checkpointing.load",
    "TrainConfig": "config.train_config",
    "UserError": "common.errors",
    "load_generator": "checkpointing.load",
    "load_model": "checkpointing.load",
    "load_run": "config.run_config",
    "load_tokenizer": "checkpointing.load",
    "look": "inspect.look",
    "open_dataset": "data.catalog",
    "patch": "inspect.patch",
}

__all__ = [
    "GPT",
    "Generator",
    "Look",
    "ModelConfig",
    "RecordedRun",
    "Request",
    "RunConfig",
    "RunFailure",
    "Sampling",
    "TextGenerator",
    "Tokenizer",
    "TrainConfig",
    "UserError",
    "load_generator",
    "load_model",
    "load_run",
    "load_tokenizer",
    "look",
    "open_dataset",
    "patch",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rungs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rungs.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

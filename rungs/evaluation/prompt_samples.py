"""The program that samples beside training, at low priority on the CPU: `python -m
rungs.evaluation.prompt_samples FOLDER`. It reads a `SamplingRequest` as a line of JSON, then names
of checkpoints in FOLDER, and finally an empty line. It appends to `samples.jsonl`, and removes each
checkpoint when done."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rungs.checkpointing import checkpoint_folder, load, manifest, published
from rungs.common import disk, errors, helper_process, signals, strict_json
from rungs.common.run_log import log
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.option_values import DATASETS_VARIABLE
from rungs.config.run_config import AnyRunConfig
from rungs.data.text.chat_template import ChatTemplate
from rungs.data.text.messages import Message
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.model.generation import Generator, Request
from rungs.model.sampling import GREEDY, Sampling
from rungs.parallel import jax_setup
from rungs.run import records
from rungs.run.folder import RunFolder

STAGED = ".sampling"
"""Folder in the run folder with links to the weights, which retention may delete meanwhile."""
TEMPERATURE = 1.0
"""Temperature of the non-greedy text: the distribution that the model was trained for."""


class SamplingRequest(strict_json.StrictModel):
    """Sampling settings for each checkpoint."""

    run: str
    """Path of the run folder."""
    prompts: list[str]
    new_tokens: int
    seed: int


class SampleProcess:
    """Samples from each checkpoint of a run that has no samples yet; the run's lock must be held.
    `train` has the prompts; `datasets_dir` is None for the default."""

    def __init__(
        self, run: RunFolder, train: OptimizationConfig, datasets_dir: Path | None = None
    ) -> None:
        self._run, self._train, self._folder = run, train, run.path / STAGED
        environment = {DATASETS_VARIABLE: str(datasets_dir)} if datasets_dir else {}
        self._process = helper_process.HelperProcess(
            "samples",
            "rungs.evaluation.prompt_samples",
            str(self._folder.resolve()),
            environment=environment | {"JAX_PLATFORMS": "cpu"},
        )
        self._sent: set[str] = set()

    def request(self) -> None:
        """Queue the checkpoints without samples; return at once. Failures only cause warnings, and
        after one that ends the process, the next start samples from the rest."""
        if not self._train.sample_prompts or self._process.has_exited:
            return
        try:
            for checkpoint in self._unsampled():
                if not self._process.is_started:
                    self._start()
                self._stage(checkpoint.folder)
                self._process.send(checkpoint.folder.name)
                self._sent.add(checkpoint.folder.name)
        except OSError as error:
            log.warning("samples: %s", error.strerror or error)

    def finish(self, *, wait: bool, stop: signals.StopSignal) -> None:
        """End the process: at once, or with `wait` when it has sampled from all checkpoints or a
        signal arrives. The next start samples from the rest."""
        if not self._process.is_started:
            return
        if wait and stop.number is None:
            self._process.finish(stop, "sampling from the last checkpoints")
        self._process.kill()
        disk.try_to_remove(self._folder)

    def _unsampled(self) -> Iterator[manifest.Checkpoint]:
        prompts, known = self._train.sample_prompts, records.read_samples(self._run)
        wanted = {(prompt, kind) for prompt in prompts for kind in records.SAMPLE_KINDS}
        for checkpoint in checkpoint_folder.list_checkpoints(self._run.checkpoints):
            name = checkpoint.folder.name
            done = {(one.prompt, one.kind) for one in known if one.step == checkpoint.step}
            if name not in self._sent and not wanted <= done:
                yield checkpoint

    def _start(self) -> None:
        disk.remove(self._folder)
        request = SamplingRequest(
            run=str(self._run.path.resolve()),
            prompts=list(self._train.sample_prompts),
            new_tokens=self._train.sample_tokens,
            seed=self._train.seed,
        )
        self._process.send(request.model_dump_json())

    def _stage(self, checkpoint: Path) -> None:
        staged = self._folder / checkpoint.name
        with contextlib.suppress(FileNotFoundError):  # deleted by retention meanwhile
            for path in checkpoint.iterdir():
                if path.name != manifest.OPTIMIZER_FOLDER:
                    staged.mkdir(parents=True, exist_ok=True)
                    disk.copy(path, staged / path.name, link=True)


class CheckpointSampler:
    """Samples from checkpoints of one model, compiling once."""

    def __init__(self, request: SamplingRequest) -> None:
        self._request = request
        self._generator: Generator | None = None

    def sample(self, folder: Path) -> list[records.Sample]:
        """Return a checkpoint's completions of the prompts: one greedy, one sampled by the seed."""
        checkpoint = manifest.read_checkpoint(folder)
        tokenizer, model = load.load_tokenizer(folder), load.load_model(folder)
        if self._generator is None:
            self._generator = Generator(model)
        else:
            self._generator.refresh(model)
        asked, template = self._request, ChatTemplate.find(folder)
        rows = encode_prompts(asked.prompts, tokenizer, template)
        stops = published.all_stop_tokens(checkpoint.weights, tokenizer, template)
        found = []
        for sampling in (GREEDY, Sampling(temperature=TEMPERATURE)):
            request = Request(asked.new_tokens, sampling._replace(stop_tokens=stops), asked.seed)
            continued = self._generator.generate(rows, request)
            for prompt, row, new in zip(asked.prompts, rows, continued, strict=True):
                found.append(
                    records.Sample(
                        time=records.now(),
                        step=checkpoint.step,
                        checkpoint=folder.name,
                        prompt=prompt,
                        temperature=sampling.temperature,
                        seed=asked.seed,
                        text=load.continuation(tokenizer, row, new),
                        tokens=len(new),
                        ended=len(new) < asked.new_tokens,
                    )
                )
        return found


def encode_prompts(
    prompts: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[list[int]]:
    """Return the token ids of each prompt: a text or, given a template, a user's message. Raises
    UserError if a prompt is not valid, or empty while no token begins texts."""
    if template is None:
        return [tokenizer.encode_beginning(prompt) for prompt in prompts]
    return [
        tokenizer.encode(template.render([Message("user", prompt)], add_generation_prompt=True))
        for prompt in prompts
    ]


def check_sample_prompts(config: AnyRunConfig, tokenizer: Path | str) -> None:
    """Check that the model can continue its run's prompts, with a tokenizer as for
    `load_tokenizer`. Raises UserError with a line for each wrong prompt."""
    prompts, model = config.train.sample_prompts, config.model
    if not prompts:
        return
    place, lines = f"{config.train_file}: sample_prompts", []
    with errors.errors_at(f"{place}: "):
        # a dataset of chats keeps the template beside the tokenizer
        template = ChatTemplate.find(tokenizer.parent) if isinstance(tokenizer, Path) else None
        rows = encode_prompts(prompts, load_tokenizer(tokenizer), template)
    for prompt, tokens in zip(prompts, rows, strict=True):
        shown, longest, size = repr(prompt[:40]), model.context_length, model.vocab_size
        if (count := len(tokens)) > longest:
            problem = f"{count} tokens, more than the model's context_length {longest}; shorten it"
            lines.append(f"{shown} has {problem}")
        elif (largest := max(tokens)) >= size:
            lines.append(f"{shown} has token id {largest}, but the model's vocab_size is {size}")
    if lines:
        raise errors.UserError.at(place, lines)


def main(folder: Path, lines: TextIO) -> None:
    """Sample from the checkpoints whose names arrive, in order."""
    jax_setup.enable_compilation_cache()
    request = SamplingRequest.model_validate_json(lines.readline())
    names = helper_process.receive(lines, exit_if_killed=True)
    sampler, run = CheckpointSampler(request), RunFolder(Path(request.run))
    while (line := names.get()) != helper_process.ENDED:
        checkpoint = folder / line.rstrip("\n")
        try:
            records.append(run, sampler.sample(checkpoint))
        except Exception as error:  # the next checkpoint may work
            print(f"{checkpoint.name}: not sampled from: {error}", file=sys.stderr, flush=True)
        disk.try_to_remove(checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.stdin)

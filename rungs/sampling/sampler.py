"""The program that samples from checkpoints: `python -m rungs.sampling.sampler FOLDER`.

Its input is a `SamplingRequest` as a line of JSON, then lines with the name of each checkpoint in
FOLDER, and at last an empty line. It appends to `samples.jsonl` and removes each checkpoint that it
is done with. If the input ends without the empty line, training was killed, and it ends at once.
"""

import os
import shutil
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

from rungs.checkpointing.load import continuation, load_model, load_tokenizer
from rungs.checkpointing.manifest import read_checkpoint
from rungs.checkpointing.published import all_stop_tokens
from rungs.common.strict_json import StrictModel
from rungs.data.chats.chat_template import ChatTemplate
from rungs.model.generation import Generator, Request
from rungs.model.sampling import GREEDY, Sampling
from rungs.parallel import jax_setup
from rungs.run import evaluations, samples
from rungs.run.folder import RunFolder
from rungs.run.samples import Sample
from rungs.sampling.prompts import encode_prompts


class SamplingRequest(StrictModel):
    """What to sample from each checkpoint."""

    run: str
    """Path of the run folder."""
    identity: str
    """See `RunFolder.identity`."""
    prompts: list[str]
    new_tokens: int
    temperature: float
    """Of the text that is not greedy."""
    seed: int


class CheckpointSampler:
    """Samples from checkpoints of one model, which compiles once."""

    def __init__(self, request: SamplingRequest) -> None:
        self._request = request
        self._generator: Generator | None = None

    def sample(self, folder: Path) -> list[Sample]:
        """Return how a checkpoint continues the prompts: greedily, and as sampled with the seed."""
        checkpoint = read_checkpoint(folder)
        tokenizer, model = load_tokenizer(folder), load_model(folder)
        if self._generator is None:
            self._generator = Generator(model)
        else:
            self._generator.refresh(model)
        asked = self._request
        template = ChatTemplate.find(folder)
        rows = encode_prompts(asked.prompts, tokenizer, template)
        stops = all_stop_tokens(checkpoint.weights, tokenizer, template)
        found = []
        for sampling in (GREEDY, Sampling(temperature=asked.temperature)):
            request = Request(asked.new_tokens, sampling._replace(stop_tokens=stops), asked.seed)
            continued = self._generator.generate(rows, request)
            for prompt, row, new in zip(asked.prompts, rows, continued, strict=True):
                found.append(
                    Sample(
                        time=evaluations.now(),
                        step=checkpoint.step,
                        checkpoint=folder.name,
                        prompt=prompt,
                        temperature=sampling.temperature,
                        seed=asked.seed,
                        text=continuation(tokenizer, row, new),
                        tokens=len(new),
                        ended=len(new) < asked.new_tokens,
                    )
                )
        return found


def main(folder: Path, lines: TextIO) -> None:
    """Sample from the checkpoints whose names arrive, in order."""
    jax_setup.enable_compilation_cache()
    names: SimpleQueue[str] = SimpleQueue()
    request = SamplingRequest.model_validate_json(lines.readline())
    threading.Thread(target=_receive, args=(lines, names), daemon=True).start()
    sampler, run = CheckpointSampler(request), RunFolder(Path(request.run), request.identity)
    while name := names.get():
        try:
            samples.append(run, sampler.sample(folder / name))
        except Exception as error:  # the next checkpoint may work
            print(f"{name}: not sampled from: {error}", file=sys.stderr, flush=True)
        shutil.rmtree(folder / name, ignore_errors=True)


def _receive(lines: TextIO, names: SimpleQueue[str]) -> None:
    """Hand on the names; end the process if there is nobody left who sends them."""
    for line in lines:
        names.put(line.rstrip("\n"))
        if line == "\n":
            return
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.stdin)

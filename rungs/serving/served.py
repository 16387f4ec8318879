"""A model that clients may ask: its weights, tokenizer and chat template; with `--follow`, each new
checkpoint of its run."""

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import click

from rungs.checkpointing.checkpoint_folder import LATEST, find_averaged_weights, find_weights
from rungs.checkpointing.load import load_token_generator, load_tokenizer
from rungs.checkpointing.published import all_stop_tokens, find_chat_template
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError, reason
from rungs.common.paths import file_checksum
from rungs.data.build.chat_dataset import ChatFormat
from rungs.data.text.tool_calls import call_beginning
from rungs.model.weight_formats import WeightFormat
from rungs.serving.engine import Engine, NamedGenerator
from rungs.serving.protocol import Body, ChatBody, CompletionBody
from rungs.serving.structured import Grammar, Grammars

SECONDS_BETWEEN_LOOKS = 2.0
"""How often to ask whether a run has a new checkpoint."""
_MOST_CHARACTERS_PER_TOKEN = 256
"""More than a published tokenizer has, even for spaces."""


class Loading(NamedTuple):
    """Which weights are loaded, and how."""

    follow: bool = False
    """Of a run, whether to take its newest checkpoint instead of its best."""
    chat_template: Path | None = None
    """None for each model's own."""
    dtype: str | None = None
    """None for the device's usual one."""
    weight_format: Literal["int8", "ema"] | None = None

    def find(self, place: str) -> Path:
        """Return the weights in a place. Raises UserError if there are none."""
        newest = Path(place) / "checkpoints" / LATEST
        is_followed = self.follow and newest.exists()
        weights = find_weights(newest if is_followed else place).resolve()
        return find_averaged_weights(weights) if self.weight_format == "ema" else weights

    def load(self, weights: Path) -> NamedGenerator:
        """Load a model. Raises UserError if it is damaged or can't be quantized."""
        form: WeightFormat = "int8" if self.weight_format == "int8" else "dtype"
        return NamedGenerator(weights.parent.name, load_token_generator(weights, self.dtype, form))


class Served:
    """A model that clients may ask.

    Args:
        place: a run, a checkpoint or a weights file.

    Attributes:
        weights: file that answers come from.
        form: how chats become tokens; None if the model has no chat template.
        call_beginning: what calls of tools begin with; None if the model's chats have none.
        stop_tokens: tokens that end a text.

    Raises:
        UserError: the model or a file beside it is missing or damaged."""

    def __init__(self, place: str, loading: Loading) -> None:
        self.place, self._loading = place, loading
        self.weights = loading.find(place)
        opened = Weights(self.weights)
        self._kind = _kind(opened)
        config = opened.header.model
        self.context_length, self.vocab_size = config.context_length, config.vocab_size
        self.tokenizer = load_tokenizer(self.weights)
        template = find_chat_template(self.weights, loading.chat_template)
        self.form = ChatFormat(template, self.tokenizer) if template else None
        self.call_beginning = call_beginning(template) if template else None
        self.stop_tokens = all_stop_tokens(opened, self.tokenizer, template)

    @property
    def step(self) -> str:
        """Name of the checkpoint that answers new requests."""
        return self.weights.parent.name

    def load(self) -> NamedGenerator:
        """Load the weights; errors as for `Loading.load`."""
        return self._loading.load(self.weights)

    def newer(self) -> NamedGenerator | None:
        """Load the weights that are there now, None if they are those of before. Raises UserError
        if they are damaged, just being deleted, or of another model."""
        weights = self._loading.find(self.place)
        if weights == self.weights:
            return None
        if _kind(Weights(weights)) != self._kind:
            raise UserError(f"{weights}: is of another model or tokenizer; serve it anew")
        generator = self._loading.load(weights)
        self.weights = weights
        return generator

    def grammar(self, body: Body) -> Grammar | None:
        """Return what an answer may be, None for any text. Raises UserError."""
        rules = body.schema_rules if isinstance(body, ChatBody) else None
        return None if rules is None else self._grammars.of(rules)

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocab_size, self.stop_tokens)

    def prompts(self, body: Body) -> list[list[int]]:
        """Return the token ids of a request's prompts. Raises UserError if they don't fit."""
        if isinstance(body, ChatBody):
            if self.form is None:
                raise UserError(
                    "this model has no chat template: use /v1/completions, or --chat-template"
                )
            if body.offered and self.call_beginning is None:
                known = "<tool_call>, [TOOL_CALLS] or Llama 3.1's"
                raise UserError(f"tools: this model's chat template has none, nor calls in {known}")
            chat, tools = body.conversation(), {"tools": body.offered} if body.offered else {}
            text = self.form.template.render(chat, tools, add_generation_prompt=True)
            prompts = [self._encoded(text, self.form.tokenizer.encode)]
        else:
            assert isinstance(body, CompletionBody)
            encode = self.tokenizer.encode_beginning
            prompts = [
                self._encoded(prompt, encode) if isinstance(prompt, str) else prompt
                for prompt in body.prompts()
            ]
        if body.asked_tokens == 0 and not body.is_echoed:
            raise UserError("max_tokens: 0 needs echo")
        for prompt in prompts:
            if not prompt:
                raise UserError("prompt: has no token")
            if max(prompt) >= self.vocab_size:
                raise UserError(f"prompt: token id {max(prompt)} is not of this model's vocabulary")
            new = self.new_tokens(body, prompt)
            if len(prompt) + max(new, 1) > self.context_length + 1:
                asked = f" and {body.asked_tokens} new ones" if body.asked_tokens else ""
                raise UserError(
                    f"the prompt's {len(prompt)} tokens{asked} are more than the model's context of"
                    f" {self.context_length}"
                )
        return prompts

    def new_tokens(self, body: Body, prompt: Sequence[int]) -> int:
        """Return the most tokens to add to a prompt."""
        if body.asked_tokens is not None:
            return body.asked_tokens
        fits = self.context_length + 1 - len(prompt)
        return min(fits, body.usual_tokens or fits)

    def _encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return a text's tokens. Raises UserError if it is too long to try, which would take
        hundreds of bytes a character."""
        if len(text) > _MOST_CHARACTERS_PER_TOKEN * (self.context_length + 1):
            raise UserError(f"the prompt is longer than the model's context, {self.context_length}")
        return encode(text)


def _kind(weights: Weights) -> tuple[object, ...]:
    """Return what all checkpoints of a run share: the model's shape and the tokenizer."""
    file = weights.tokenizer_file
    return weights.header.model, file_checksum(file) if file else weights.header.tokenizer


def names_of(places: Sequence[str]) -> list[str]:
    """Return names of models from what the command line calls them: the last part of a run's path;
    of a checkpoint its run's, too. Raises UserError if two have one name."""
    names = []
    for parts in (Path(place).absolute().parts for place in places):
        is_checkpoint = "checkpoints" in parts[-3:-1]
        run = parts[parts.index("checkpoints") - 1] + "/" if is_checkpoint else ""
        names.append(run + parts[-1])
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise UserError(f"{name}: {count} models have this name; serve one of them, or a copy")
    return names


def follow(engine: Engine, models: Mapping[str, Served]) -> NoReturn:
    """Give an engine the newest weights of its models, again and again. A problem with those of a
    model is printed once, and the earlier ones go on."""
    problems: dict[str, str] = {}
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        for name, model in models.items():
            try:
                newer = model.newer()
            except (UserError, OSError) as error:
                if problems.get(name) != (problem := reason(error)):
                    click.echo(f"{name}: {problem}; {model.step} goes on", err=True)
                problems[name] = problem
                continue
            problems.pop(name, None)
            if newer is not None:
                engine.replace(name, newer)
                click.echo(f"{name}: now {model.step}", err=True)

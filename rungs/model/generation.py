"""Generate text from a model, batched, with a key/value cache. Prompts are padded to a bucket
length, and the number of slots is rounded up; each such shape compiles one prefill and one decoding
loop with any number of steps.

Axes as in `gpt.py`; S slots of the padded prompts."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.common.errors import RunFailure, UserError
from rungs.data.build.chat_dataset import ChatFormat
from rungs.data.text.messages import ASSISTANT, Message
from rungs.data.text.tokenizer import Tokenizer
from rungs.model import gpt, lookahead, weight_formats
from rungs.model.decoding import Decoder, Prompts, pad_left, states_of
from rungs.model.sampling import GREEDY, UNDEFINED, Sampling

SMALLEST_BUCKET = 16
SLOT_MULTIPLE = 32
Texts = list[list[int]]


class Request(NamedTuple):
    """Generation settings for a batch of prompts."""

    new_tokens: int
    """Maximum number of tokens to add to each text."""
    sampling: Sampling = GREEDY
    seed: int = 0
    """Samples depend on this, the row and the token's index, not on other rows."""
    lookahead: int = 0
    """Tokens to draft from the text so far and verify in one pass (`lookahead.py`); 0 for one token
    at a time. Below the model's `context_length`."""


class Generator:
    """A model prepared for generation: layers unstacked, matrices in one format.

    Args:
        model: its parameters are copied.
        compute_dtype: dtype of matrices, activations and, except on a CPU, the cache.
        weight_format: "int8" quantizes the matrices, which makes small batches faster and results
            less accurate (docs/performance.md).

    Attributes:
        decoder: the model's structure.
        weights: the model's weights in the decoder's format.

    Raises:
        ValueError: the model can't be quantized."""

    def __init__(
        self,
        model: gpt.GPT,
        compute_dtype: jnp.dtype = jnp.float32,
        weight_format: weight_formats.WeightFormat = "dtype",
    ) -> None:
        self.decoder = Decoder(model, compute_dtype, weight_format)
        self.dtype = self.decoder.dtype
        self.weights = self.decoder.weights(states_of(model))
        self._jit_prefill = jax.jit(self.decoder.prefill, static_argnames=("slots", "sampling"))
        self._jit_decode = jax.jit(
            self.decoder.decode, static_argnames="sampling", donate_argnames="state"
        )
        self._jit_lookahead = jax.jit(
            functools.partial(lookahead.decode, self.decoder),
            static_argnames=("sampling", "draft_length"),
            donate_argnames="state",
        )

    def refresh(self, model: gpt.GPT) -> None:
        """Replace the weights by those of the same model after an update."""
        del self.weights  # before the new ones need memory
        self.weights = self.decoder.weights(states_of(model))

    @property
    def context_length(self) -> int:
        """Maximum number of tokens that the model can attend to."""
        return self.decoder.config.context_length

    def generate(self, prompts: Sequence[Sequence[int]], request: Request) -> Texts:
        """Return the new tokens of each prompt, without the stop token.

        Args:
            prompts: token ids, at least one each.

        Raises:
            ValueError: a prompt is empty, or has a token id that the model doesn't have; the
                lookahead is out of range.
            UserError: a sampling setting is out of range, or the model can't look ahead.
            RunFailure: the model's logits are NaN."""
        result: Texts = [[] for _ in prompts]
        for chunk in self.stream(prompts, request, chunk_size=request.new_tokens):
            for row, new_tokens in zip(result, chunk, strict=True):
                row += new_tokens
        return result

    def stream(
        self, prompts: Sequence[Sequence[int]], request: Request, chunk_size: int = 8
    ) -> Iterator[Texts]:
        """Yield the tokens of `generate` as they are made: first one per prompt, then `chunk_size`
        at a time, with lookahead at least as many; none for texts that have stopped.

        The model attends to at most `context_length` tokens. A text that outgrows this is prefilled
        again with its last half context."""
        self.decoder.check(prompts)
        request.sampling.check()
        if request.lookahead and self.decoder.config.delta_net:
            raise UserError(
                "lookahead: not for a model with delta_net layers, whose state can't go back to"
                " before a token; leave it out"
            )
        if not 0 <= request.lookahead < self.context_length:
            raise ValueError(
                f"lookahead {request.lookahead} is negative, or not below the model's"
                f" context_length {self.context_length}"
            )

        def is_kept(token: int) -> bool:
            return token not in request.sampling.stop_tokens

        texts = [list(prompt) for prompt in prompts]
        window_starts = [0] * len(texts)
        context = self.context_length
        half = max(context // 2, 1)
        stopped_B = np.zeros(len(texts), bool)
        generated = 0
        while generated < request.new_tokens and not stopped_B.all():
            window_starts = [
                start if len(text) - start <= context else len(text) - half
                for text, start in zip(texts, window_starts, strict=True)
            ]
            windows = [text[start:] for text, start in zip(texts, window_starts, strict=True)]
            longest = max(map(len, itertools.compress(windows, ~stopped_B)))
            count = min(context + 1 - longest, request.new_tokens - generated)
            chunks = self._stream_in_context(
                windows, stopped_B, request, generated, count, chunk_size
            )
            for chunk, stopped in chunks:
                yield [[*itertools.takewhile(is_kept, row)] for row in chunk]
                texts = [text + row for text, row in zip(texts, chunk, strict=True)]
                stopped_B = stopped
            generated += count

    def logits_after(self, texts: Sequence[Sequence[int]], decoded: int) -> np.ndarray:
        """Return logits_BSV, float32, as in generation: after the prefill of each text without its
        last `decoded` tokens, then after each of those, added one by one through the cache. Each
        text must be longer than `decoded` and fit the context."""
        rows = len(texts)
        starts = [list(text[: len(text) - decoded]) for text in texts]
        length = bucket_length(starts)
        tokens_BS, padding_B = map(jnp.asarray, pad_left(starts, length))
        prompts = Prompts(tokens_BS, padding_B, jnp.zeros(rows, bool), row_keys(0, rows), 0)
        state = self.decoder.initial_state(prompts, slots=length + decoded)
        last_logits = jax.jit(self.decoder.last_logits)
        logits_BV, caches = last_logits(self.weights, state, tokens_BS, None)
        found = [logits_BV]
        for place in range(decoded):
            state = state._replace(caches=caches)
            column_B1 = np.array([[text[len(text) - decoded + place]] for text in texts])
            logits_BV, caches = last_logits(self.weights, state, column_B1, length + place)
            found.append(logits_BV)
        return np.stack(found, axis=1)

    def _stream_in_context(
        self,
        windows: Texts,
        stopped_B: np.ndarray,
        request: Request,
        generated: int,
        count: int,
        chunk_size: int,
    ) -> Iterator[tuple[Texts, np.ndarray]]:
        """Generate `count` tokens per text, or fewer if all stop, after one prefill. Yields each
        row's new tokens, stop token included, and which rows have stopped."""
        rows, sampling = len(windows), request.sampling
        length = bucket_length(windows)
        last = length - 1 + count
        slots = -(-(last + 1 + request.lookahead) // SLOT_MULTIPLE) * SLOT_MULTIPLE
        tokens_BS, padding_B, all_stopped_B = map(
            jnp.asarray, (*pad_left(windows, length), stopped_B)
        )
        keys_B = row_keys(request.seed, rows)
        prompts = Prompts(tokens_BS, padding_B, all_stopped_B, keys_B, generated)
        state = self._jit_prefill(self.weights, prompts, slots=slots, sampling=sampling)
        read_B = np.full(rows, length)
        while True:
            tokens_BT, ends_B, stopped_B = (
                np.asarray(array) for array in (state.tokens_BT, state.ends_B, state.stopped_B)
            )
            places = zip(tokens_BT, read_B, ends_B, strict=True)
            added = [text[read:end].tolist() for text, read, end in places]
            for row, tokens in enumerate(added):
                if UNDEFINED in tokens:
                    hint = "" if self.decoder.dtype == jnp.float32 else ", or generate in float32"
                    raise RunFailure(
                        f"text {row + 1}: the model's logits are NaN; use another checkpoint{hint}"
                    )
            yield added, stopped_B
            slot = int(state.slot)
            if slot == last or stopped_B.all():
                return
            read_B = ends_B
            arguments = {"limit": min(slot + chunk_size, last), "sampling": sampling}
            if request.lookahead:  # rows may get tokens after the limit, up to `last`
                arguments |= {"last": last, "draft_length": request.lookahead}
                state = self._jit_lookahead(self.weights, state=state, **arguments)
            else:
                state = self._jit_decode(self.weights, state=state, **arguments)


@dataclasses.dataclass
class Conversation:
    """Messages so far, and the model that answers.

    Attributes:
        request: for the first answer; later ones use the next seeds.
        prompt_tokens: number of tokens before the last answer.
        answer_tokens: number of tokens of the last answer so far."""

    generator: Generator
    form: ChatFormat
    request: Request
    messages: list[Message] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def answer(self, content: str) -> Iterator[str]:
        """Yield the answer to a user's message piece by piece. Both become part of the
        conversation; of an unfinished answer, the part that was read. Raises UserError if the
        template or the tokenizer refuses the message."""
        asked = [*self.messages, Message("user", content)]
        text = self.form.template.render(asked, add_generation_prompt=True)
        prompt, number = self.form.tokenizer.encode(text), len(self.messages)
        self.messages = [*asked, Message(ASSISTANT, "")]
        request = self.request._replace(seed=self.request.seed + number)
        self.prompt_tokens, self.answer_tokens = len(prompt), 0

        def chunks() -> Iterator[list[int]]:
            for (tokens,) in self.generator.stream([prompt], request):
                self.answer_tokens += len(tokens)
                yield tokens

        for piece in decode_stream(chunks(), self.form.tokenizer):
            said = self.messages[-1].content or ""
            self.messages[-1] = Message(ASSISTANT, said + piece)
            yield piece


def decode_stream(chunks: Iterable[Sequence[int]], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of tokens as they arrive, without special tokens. Text that later tokens may
    change, such as an incomplete character, is held back."""
    tokens, given = list[int](), 0
    for chunk in chunks:
        tokens += chunk
        text = tokenizer.decode_settled(tokens)
        yield text[given:]
        given = len(text)
    yield tokenizer.decode(tokens, skip_special_tokens=True)[given:]


def bucket_length(texts: Texts) -> int:
    """Return the length to which texts are padded."""
    length = SMALLEST_BUCKET
    while length < max(map(len, texts)):
        length *= 2
    return length


def row_keys(seed: int, rows: int) -> Array:
    """Return one random key per row, independent of the number of rows."""
    return jax.vmap(row_key, (None, 0))(seed, jnp.arange(rows))


def row_key(seed: int, row: int | Array) -> Array:
    """Return a row's random key."""
    return jax.random.fold_in(jax.random.key(seed), row)

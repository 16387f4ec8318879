"""A conversation with a model, in the format of its chat template."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from rungs.data.chats.chat_dataset import ChatFormat
from rungs.data.chats.messages import ASSISTANT, Message
from rungs.data.tokenizer import Tokenizer
from rungs.model.generation import Generator, Request


@dataclasses.dataclass
class Conversation:
    """Messages so far, and the model that answers.

    Attributes:
        request: of the first answer; the seed of later ones counts up.
        answer_tokens: the number of tokens of the last answer so far.
    """

    generator: Generator
    form: ChatFormat
    request: Request
    messages: list[Message] = dataclasses.field(default_factory=list)
    answer_tokens: int = 0

    def answer(self, content: str) -> Iterator[str]:
        """Yield the pieces of the answer to a user's message as they are made. Both become part of
        the conversation; of an answer that is not read to its end, what was read.

        Raises:
            UserError: the template or the tokenizer refuses the message.
        """
        asked = [*self.messages, Message("user", content)]
        text = self.form.template.render(asked, add_generation_prompt=True)
        prompt, number = self.form.tokenizer.encode(text), len(self.messages)
        self.messages = [*asked, Message(ASSISTANT, "")]
        request = self.request._replace(seed=self.request.seed + number)
        self.answer_tokens = 0
        for piece in decode_stream(self._stream(prompt, request), self.form.tokenizer):
            said = self.messages[-1].content or ""
            self.messages[-1] = Message(ASSISTANT, said + piece)
            yield piece

    def _stream(self, prompt: list[int], request: Request) -> Iterator[list[int]]:
        for (tokens,) in self.generator.stream([prompt], request):
            self.answer_tokens += len(tokens)
            yield tokens


def decode_stream(chunks: Iterable[Sequence[int]], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of tokens as they arrive, without special tokens. What later tokens may change
    waits for them, such as an incomplete character, at most until the end."""
    tokens, given = list[int](), 0
    for chunk in chunks:
        tokens += chunk
        text = tokenizer.decode_settled(tokens)
        yield text[given:]
        given = len(text)
    yield tokenizer.decode(tokens, skip_special_tokens=True)[given:]

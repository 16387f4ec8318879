"""Compare an imported tokenizer with that of transformers: texts in many scripts, special tokens,
chats."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rungs.common.errors import UserError
from rungs.common.shown_text import counted
from rungs.data.chats.chat_template import ChatTemplate
from rungs.data.chats.messages import messages_of
from rungs.data.tokenizer import Tokenizer

TEXTS = (
    "The quick brown fox can't jump over 12,345.67 lazy dogs; I'll see!",
    "def main(x):\n\tif x >= 0x1F:\n        return {'a': [x ** 2]}  # done\n\n\n",
    "   leading, trailing and   inner spaces   \t\r\n",
    "Straße, déjà vu, señor, Łódź, Gődöllő, İstanbul ıI",
    "Cafe\u0301 and Café; ﬁne ½ ² № \u00a0no break\u200bzero width\ufeff",
    "Ελληνικά: η γλώσσα. Русский: язык, ёж. Українська: її",
    "עברית: שָׁלוֹם. العربية: اللُّغَةُ ١٢٣. فارسی: می‌روم",
    "हिन्दी: क्षत्रिय भाषा। বাংলা: ভাষা। தமிழ்: மொழி",
    "ไทย: ภาษาไทยไม่มีช่องว่าง ລາວ: ພາສາ မြန်မာ: ဘာသာ",
    "中文：我喜欢读书，２０２４年。繁體：語言學",
    "日本語：私は学生です。カタカナ、ｶﾅ 한국어: 언어를 배웁니다",
    "ქართული: ენა. Հայերեն: լեզու. አማርኛ: ቋንቋ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 👍🏽 😀😀 𝕌𝕟𝕚 𐍈 𓀀",
    "\x00\x07\x1b[0m \x7f \u2028 \ufffd a\u0000b",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0000000000000000000000000000",
    "<s></s><unk> [INST] <|endoftext|> <bos> <|im_start|>user",
    "a",
    "",
)
USER, ASSISTANT = "Who wrote Ἰλιάς, and when?", "Homer, they say.\n\nAbout 800 BC."
CHATS = (
    (("user", USER),),
    (("user", USER), ("assistant", ASSISTANT), ("user", "  Thanks! 谢谢 ")),
    (("system", "Be brief."), ("user", USER), ("assistant", ASSISTANT), ("user", "Why?")),
)
MOST_SPECIAL = 100
"""Special tokens to compare; some vocabularies have thousands that are not used."""
_SHOWN_IDS = 12


class Request(NamedTuple):
    """What both tokenizers encode, as `transformers_tokenizer.py` reads it."""

    texts: list[str]
    chats: list[list[dict[str, str]]]

    def describe(self, answers: dict[str, list[Any]]) -> str:
        """Say how much both encoded: a chat counts unless transformers refused it."""
        special = counted(len(self.texts) - len(TEXTS), "special token")
        chats = sum(ids is not None for ids in answers["chats"])
        return f"{len(TEXTS)} texts, {special} and {counted(chats, 'chat')}"


def request_for(tokenizer: Tokenizer) -> Request:
    """Return the texts to compare, some of them with a special token of the tokenizer, and the
    chats: also without a template, which the import may have lost."""
    names = [tokenizer.decode([number]) for number in sorted(tokenizer.special_ids)[:MOST_SPECIAL]]
    chats = [[{"role": role, "content": content} for role, content in chat] for chat in CHATS]
    return Request([*TEXTS, *(f"a {name}b" for name in names)], chats)


def differences(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    request: Request,
    answers: dict[str, list[Any]],
) -> Iterator[str]:
    """Yield a line for each text or chat with other ids in `answers`, which are as in
    `transformers_tokenizer.py`."""
    for text, plain, whole in zip(request.texts, answers["texts"], answers["whole"], strict=True):
        yield from _difference(repr(text), tokenizer.encode(text), plain)
        ours = [*tokenizer.encode_prompt(text), *tokenizer.template_end]
        yield from _difference(f"{text!r}, with what begins and ends it,", ours, whole)
    for text, ids in answers["special"][:MOST_SPECIAL]:
        if text not in request.texts:
            yield from _difference(repr(text), tokenizer.encode(text), ids)
    for chat, ids in zip(request.chats, answers["chats"], strict=True):
        yield from _difference(
            f"a chat of {counted(len(chat), 'message')}", _chat_ids(tokenizer, template, chat), ids
        )


def _chat_ids(
    tokenizer: Tokenizer, template: ChatTemplate | None, chat: list[dict[str, str]]
) -> list[int] | None:
    """Return the ids of a chat and of the start of an answer, None without a template for it."""
    if template is None:
        return None
    try:
        return tokenizer.encode(template.render(messages_of(chat), add_generation_prompt=True))
    except UserError:
        return None


def _difference(what: str, ours: list[int] | None, theirs: list[int] | None) -> Iterator[str]:
    if ours != theirs:
        yield f"{what} is {_ids(ours)}, in transformers {_ids(theirs)}"


def _ids(ids: list[int] | None) -> str:
    if ids is None:
        return "refused"
    more = ", …" if len(ids) > _SHOWN_IDS else ""
    return f"[{', '.join(map(str, ids[:_SHOWN_IDS]))}{more}]"

"""Built-in chat templates write what publishers document: ChatML
(https://github.com/openai/openai-python/blob/v0.28.1/chatml.md), Meta's Llama 3 and Google's
Gemma 3."""

from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.data.build.chat_dataset import ChatFormat
from rungs.data.text.chat_template import BUILT_IN, ChatTemplate
from rungs.data.text.messages import messages_of
from rungs.data.text.tokenizer import train_bpe

Turns = list[tuple[str, str]]
"""Roles, by their first letter, and contents."""
TALKS: dict[str, Turns] = {
    "question": [("u", "Hi")],
    "answer": [("u", "Hi"), ("a", "Hello.")],
    "two turns": [("u", "1+1?"), ("a", "2"), ("u", "2+2?")],
    "system": [("s", "Be brief."), ("u", "Hi")],
    "system, two turns": [("s", "Be brief."), ("u", "Hi"), ("a", "Yo"), ("u", "Bye"), ("a", "Bye")],
    "spaces": [("u", "  Hi \n"), ("a", "\n Hello. ")],
    "system with spaces": [("s", " Be brief. "), ("u", " Hi ")],
    "lines": [("u", "a\n\nb"), ("a", "- c\n- d")],
    "braces": [("u", "{{ x }} {% y %}"), ("a", "<b>&'\"</b>")],
    "unicode": [("u", "Grüß dich 😀"), ("a", "")],
}
# By name: the text of each talk without the prompt of an answer.
CHATML = {
    "question": "<|im_start|>user\nHi<|im_end|>\n",
    "answer": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n",
    "two turns": "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    "<|im_start|>user\n2+2?<|im_end|>\n",
    "system": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n",
    "system, two turns": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\nBye<|im_end|>\n",
    "spaces": "<|im_start|>user\n  Hi \n<|im_end|>\n<|im_start|>assistant\n\n Hello. <|im_end|>\n",
    "system with spaces": "<|im_start|>system\n Be brief. <|im_end|>\n"
    "<|im_start|>user\n Hi <|im_end|>\n",
    "lines": "<|im_start|>user\na\n\nb<|im_end|>\n<|im_start|>assistant\n- c\n- d<|im_end|>\n",
    "braces": "<|im_start|>user\n{{ x }} {% y %}<|im_end|>\n"
    "<|im_start|>assistant\n<b>&'\"</b><|im_end|>\n",
    "unicode": "<|im_start|>user\nGrüß dich 😀<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n",
}
LLAMA3 = {
    "question": "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "answer": "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>",
    "two turns": "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>",
    "system": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "system, two turns": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nBye<|eot_id|>",
    "spaces": "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>",
    "system with spaces": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "lines": "<|start_header_id|>user<|end_header_id|>\n\na\n\nb<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n- c\n- d<|eot_id|>",
    "braces": "<|start_header_id|>user<|end_header_id|>\n\n{{ x }} {% y %}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<b>&'\"</b><|eot_id|>",
    "unicode": "<|start_header_id|>user<|end_header_id|>\n\nGrüß dich 😀<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<|eot_id|>",
}
GEMMA = {
    "question": "<start_of_turn>user\nHi<end_of_turn>\n",
    "answer": "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n",
    "two turns": "<start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
    "<start_of_turn>user\n2+2?<end_of_turn>\n",
    "system": "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n",
    "system, two turns": "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
    "<start_of_turn>model\nYo<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n"
    "<start_of_turn>model\nBye<end_of_turn>\n",
    "spaces": "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n",
    "system with spaces": "<start_of_turn>user\n Be brief. \n\nHi<end_of_turn>\n",
    "lines": "<start_of_turn>user\na\n\nb<end_of_turn>\n"
    "<start_of_turn>model\n- c\n- d<end_of_turn>\n",
    "braces": "<start_of_turn>user\n{{ x }} {% y %}<end_of_turn>\n"
    "<start_of_turn>model\n<b>&'\"</b><end_of_turn>\n",
    "unicode": "<start_of_turn>user\nGrüß dich 😀<end_of_turn>\n"
    "<start_of_turn>model\n<end_of_turn>\n",
}
FORMATS = {
    "chatml": ("", CHATML, "<|im_start|>assistant\n"),
    "llama3": ("<|begin_of_text|>", LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "gemma": ("<bos>", GEMMA, "<start_of_turn>model\n"),
}
ROLES = {"s": "system", "u": "user", "a": "assistant"}


def built_in(name: str, folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder, Path(name))


def test_every_template_is_tested() -> None:
    assert {*BUILT_IN} == {*FORMATS}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_talk_is_the_published_text(name: str, talk: str, tmp_path: Path) -> None:
    begin, texts, prompt = FORMATS[name]
    messages = messages_of([{"role": ROLES[role], "content": text} for role, text in TALKS[talk]])
    template = built_in(name, tmp_path)
    assert template.render(messages) == begin + texts[talk]
    assert template.render(messages, add_generation_prompt=True) == begin + texts[talk] + prompt


def test_gemma_needs_turns_that_alternate(tmp_path: Path) -> None:
    for roles in (["user", "user"], ["assistant"], ["system", "system"]):
        messages = messages_of([{"role": role, "content": "a"} for role in roles])
        with pytest.raises(UserError, match=r"refuses this chat: turns .* must alternate"):
            built_in("gemma", tmp_path).render(messages)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_template_has_no_place_for_is_refused(name: str, tmp_path: Path) -> None:
    talk = messages_of([{"role": "user", "content": "a"}])
    with pytest.raises(UserError, match="the chat template leaves out tools"):
        built_in(name, tmp_path).render(talk, {"tools": [{"type": "function"}]})


@pytest.mark.parametrize(("name", "token"), [("chatml", "<|im_start|>"), ("gemma", "<bos>")])
def test_a_tokenizer_of_another_family_is_refused(name: str, token: str, tmp_path: Path) -> None:
    """It would spell the tokens, and no answer would ever end."""
    with pytest.raises(UserError, match=r"tokenizer has no token " + token.replace("|", r"\|")):
        ChatFormat(built_in(name, tmp_path), train_bpe([], 257))

"""`generate.py` as a user runs it, in this process: what it prints and which input it refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner, Result
from tokenizers import processors

import rungs
from rungs.checkpointing.published import stop_tokens
from rungs.checkpointing.weights_file import WeightsHeader, write_weights
from rungs.cli import evaluate, generate
from rungs.cli.generate import (
    check_token_ids,
    print_streamed,
    read_prompts,
)
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.data.text.tokenizer import Tokenizer, train_bpe
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.evaluation.checkpoint_scores import Measured
from tests.cli.test_commands import BYTES, IN_SHARDS, byte_model
from tests.support.configs import ONE_FILE, model_config, train_config


@pytest.fixture(scope="module")
def copying_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats the last byte."""
    return byte_model(tmp_path_factory.mktemp("copying_model"), 50.0)


@pytest.fixture(scope="module")
def uniform_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for which every byte is equally likely."""
    return byte_model(tmp_path_factory.mktemp("uniform_model"), 0.0)


@pytest.fixture(scope="module")
def counting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that counts up token ids, and ends the text after "e"."""
    folder = tmp_path_factory.mktemp("counting")
    tokenizer = train_bpe([], BYTES)
    (a,), (e,), end = tokenizer.encode("a"), tokenizer.encode("e"), tokenizer.end_of_text
    follower = np.roll(np.arange(BYTES), -1)
    assert end is not None
    follower[e] = end
    assert a < e
    config = RunConfig(
        model_config(vocab_size=BYTES, emb_dim=BYTES, n_layers=0, positions="none", norm="none"),
        train_config(),
    )
    weights = {
        "token_embedding.embedding": np.eye(BYTES, dtype=np.float32),
        "head.kernel": np.eye(BYTES, dtype=np.float32)[follower],
    }
    write_weights(folder, weights, WeightsHeader(*config, tokenizer="bytes"), ONE_FILE)
    tokenizer.save(folder / "tokenizer.json")
    return folder / "model.safetensors"


@pytest.fixture(scope="module")
def masked_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bidirectional model whose masks are most likely "e"."""
    folder = tmp_path_factory.mktemp("masked")
    tokenizer = train_bpe([], BYTES)
    sizes = {"vocab_size": BYTES + 1, "emb_dim": BYTES, "n_layers": 0, "bidirectional": True}
    config = RunConfig(
        model_config(**sizes, positions="none", norm="none"),
        train_config(objective="masked_diffusion", target_offset=0),
    )
    table = np.eye(BYTES + 1, BYTES, dtype=np.float32)
    table[BYTES, tokenizer.encode("e")] = 1
    weights = {"token_embedding.embedding": table, "head.kernel": table.T.copy()}
    write_weights(folder, weights, WeightsHeader(*config, tokenizer="bytes"), ONE_FILE)
    tokenizer.save(folder / "tokenizer.json")
    return folder / "model.safetensors"


def test_masks_are_filled_in(masked_model: Path) -> None:
    result = run(masked_model, "W", "--new-tokens", 5, "--passes", 2)
    assert result.stdout == "Weeeee\n"
    assert run(masked_model, "W", "Th", "--new-tokens", 3).stdout.endswith("Theee\n")


def test_what_needs_a_next_token_refuses_masked_diffusion(
    masked_model: Path, copying_model: Path
) -> None:
    for place, option in ((masked_model, "--lookahead"), (copying_model, "--passes")):
        message = str(run(place, "W", option, 2).exception)
        assert message == "--passes is for masked_diffusion; --lookahead and int8 are for others"
    for refused in (
        lambda: rungs.load_generator(masked_model),
        lambda: rungs.look(rungs.load_model(masked_model), [[1, 2]]),
        lambda: evaluate.print_loss(str(masked_model), None, masked_model.parent),
        lambda: Measured.find(str(masked_model), 1, masked_model.parent)._scorer(),
    ):
        with pytest.raises(UserError, match=r"^the model is bidirectional: it fills in"):
            refused()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(generate.main, [str(argument) for argument in arguments])


def test_one_prompt_is_continued(copying_model: Path) -> None:
    result = run(copying_model, "Well", "--new-tokens", 12)
    assert result.stdout == "Wellllllllllllll\n"
    warning, timing = result.stderr.splitlines()
    assert warning.startswith("texts may become longer than the model's context of 8 tokens")
    assert timing.startswith("12 tokens in ")
    assert timing.endswith(f"from {copying_model}")


def test_sharded_weights_are_found_by_any_of_their_names(tmp_path: Path) -> None:
    path = byte_model(tmp_path, 50.0, max_weights_file_bytes=IN_SHARDS)
    assert not path.exists()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": []}')
    for place in (path, tmp_path, tmp_path / "model.safetensors.index.json"):
        result = run(place, "Well", "--new-tokens", 4)
        assert result.stdout == "Wellllll\n"
        assert result.stderr.endswith("model.safetensors.index.json\n")


def test_a_text_ends_at_the_end_of_text_token(counting_model: Path) -> None:
    assert run(counting_model, "a", "--new-tokens", 12).stdout == "abcde\n"
    beyond = run(counting_model, "a", "--new-tokens", 12, "--past-the-end")
    assert beyond.stdout.startswith("abcde")
    assert len(beyond.stdout) > len("abcde\n")


def test_texts_begin_and_end_as_those_of_the_model(counting_model: Path, tmp_path: Path) -> None:
    """By the published files: "a" begins them, and "d" ends them."""
    folder = Path(shutil.copytree(counting_model.parent, tmp_path / "model"))
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(letter, raw.token_to_id(letter)) for letter in "ae"]
    raw.post_processor = processors.TemplateProcessing("a $A e", special_tokens=special)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": raw.token_to_id("d")}))
    result = run(folder, "", "--new-tokens", 12)
    assert result.stdout == "abc\n"
    assert result.stderr.startswith("prompts begin with a (65); texts end with d (68)\n")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}a{{ messages[-1].content }}")
    answered = run(folder, "b", "--chat", "--new-tokens", 2)
    assert answered.stderr.startswith("conversations begin with a (65); answers end with d (68)")
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"prompt": "b", "choices": ["c", "d"], "answer": 0}))
    scored = CliRunner().invoke(evaluate.main, [str(folder), "--choices", str(items)])
    assert scored.exit_code == 0, scored.output
    assert scored.stderr == "texts begin with a (65)\n"
    generator = rungs.load_generator(folder)
    assert generator.continue_texts(["", "b"], 12) == ["bc", "c"]
    past = rungs.Sampling(stop_tokens=tuple(load_tokenizer(folder).encode("c")))
    assert generator.continue_texts([""], 12, past) == ["b"]
    with pytest.raises(TypeError, match="one text"):
        generator.continue_texts("b", 12)


def test_several_prompts_are_numbered(counting_model: Path, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("b\n\nxd\n")
    result = run(counting_model, "a", "--prompts-file", lines)
    assert result.stdout.splitlines() == [
        "--- prompt 1 of 3",
        "abcde",
        "--- prompt 2 of 3",
        "bcde",
        "--- prompt 3 of 3",
        "xde",
    ]


def test_samples_differ_and_are_reproducible(uniform_model: Path) -> None:
    arguments = (uniform_model, "a", "--num-samples", 3, "--temperature", 1, "--new-tokens", 8)
    first = run(*arguments).stdout
    assert "--- prompt 1 of 1, sample 3 of 3" in first
    assert len(set(first.split("--- prompt 1 of 1, sample ")[1:])) == 3
    assert run(*arguments).stdout == first
    assert run(*arguments, "--seed", 1).stdout != first


def test_lookahead_prints_the_same_texts(copying_model: Path) -> None:
    command = (copying_model, "Well", "--new-tokens", 12, "--num-samples", 3, "--temperature", 8)
    assert run(*command, "--lookahead", 3).stdout == run(*command).stdout


def test_weights_of_8_bits_are_used_and_named(copying_model: Path) -> None:
    plain = run(copying_model, "ab", "--new-tokens", 4)
    rounded = run(copying_model, "ab", "--new-tokens", 4, "--weights", "int8")
    assert rounded.exit_code == 0
    assert rounded.stdout == plain.stdout == "abbbbb\n"
    assert "in float32 with int8 weights, from" in rounded.stderr


def test_a_mixture_of_experts_is_not_rounded_nor_read(tmp_path: Path) -> None:
    experts = model_config(vocab_size=BYTES, n_experts=2, experts_per_token=1)
    header = WeightsHeader(experts, train_config(), tokenizer="bytes")
    write_weights(tmp_path, {"unread": np.zeros(1, np.float32)}, header, ONE_FILE)
    train_bpe([], BYTES).save(tmp_path / "tokenizer.json")
    result = run(tmp_path, "ab", "--weights", "int8")
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "--weights int8: not for a mixture of experts; leave it out"


def test_a_draft_as_long_as_the_context_is_refused(copying_model: Path) -> None:
    result = run(copying_model, "a", "--lookahead", 8)
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "--lookahead 8: must be below the model's context_length 8"
    assert run(copying_model, "a", "--lookahead", -1).exit_code == 2


def test_prompts_in_jsonl_may_contain_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a\nb"}) + "\n" + json.dumps({"prompt": ""}) + "\n")
    assert read_prompts(path) == ["a\nb", ""]
    path.write_text('{"prompt": "a"}\n\n{"promt": "b"}\n')
    with pytest.raises(UserError, match=r"prompts.jsonl: line 3: must be an object"):
        read_prompts(path)
    path.write_text('{"prompt": "a"}\n{"prompt": "\\ud800"}\n')
    with pytest.raises(UserError, match=r"prompts.jsonl: line 2: has an invalid character"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("PROMPTS.JSONL", '{"prompt": "a"}\n', ["a"]),
        ("prompts.txt", "\ufeffone\r\n\r\ntwo\r\n", ["one", "two"]),
    ],
)
def test_prompts_may_come_from_windows(
    name: str, content: str, prompts: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert read_prompts(tmp_path / name) == prompts


def test_a_prompts_file_without_a_prompt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n \n")
    result = run("no-such-model", "--prompts-file", path)
    assert str(result.exception) == f"{path}: has no prompt"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no prompt"),
        (("a", "--top-p", "1.5"), "--top-p: 1.5 is not allowed"),
        (("a", "--top-k", "5", "--temperature", "0"), "--top-k: has no effect at temperature 0"),
        (("a", "--num-samples", "2"), "greedy samples are all the same"),
        (("a", "--prompts-file", "no-such-file"), "no-such-file: no such file"),
    ],
)
def test_invalid_arguments_are_refused_before_the_model_is_loaded(
    arguments: tuple[str, ...], message: str
) -> None:
    result = run("no-such-model", *arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match="token id 300, but the model's vocab_size is 257"):
        check_token_ids([[1, 300]], BYTES)


@pytest.mark.parametrize("content", ["{", "[1]", '{"eos_token_id": "x"}'])
def test_a_damaged_generation_config_is_reported(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        stop_tokens(tmp_path, train_bpe([], BYTES))


def test_only_complete_characters_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_bpe([], BYTES)
    smile = tokenizer.encode("🙂")
    written: list[str] = []

    def one_by_one() -> object:
        for token in smile:
            yield [token]
            written.append(capsys.readouterr().out)

    count = print_streamed(tokenizer.encode("é"), one_by_one(), tokenizer)  # type: ignore[arg-type]
    assert count == len(smile) > 1
    assert "".join(written) + capsys.readouterr().out == "é🙂\n"
    assert not any("\ufffd" in piece for piece in written)


def test_a_file_or_pipe_gets_the_text_as_it_is(copying_model: Path) -> None:
    result = run(copying_model, "\x1b[2J\r", "\x9b31m", "--new-tokens", 1)
    assert "\x1b[2J\r\r\n" in result.stdout_bytes.decode()


def test_stop_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    tokenizer: Tokenizer = train_bpe([], BYTES)
    assert stop_tokens(tmp_path, tokenizer) == (tokenizer.end_of_text,)
    path = tmp_path / "generation_config.json"
    for written, expected in ((7, (7,)), ([7, 9], (7, 9)), (None, (tokenizer.end_of_text,))):
        path.write_text(json.dumps({"eos_token_id": written}))
        assert stop_tokens(tmp_path, tokenizer) == expected

"""`model.py --look`: the page has what `rungs.look` returns; what doesn't fit is refused."""

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers

import rungs
from rungs.data.build.task_dataset import character_tokenizer
from rungs.data.text.tokenizer import TOKENIZER_FILE
from tests.support.commands import Finished, run_script
from tests.support.layered_model import write_model
from tests.support.tiny_run import make_run

TEXT = 'a </script> of "text"\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("look") / "run")


def look(run: Path, text: str = TEXT, *options: str) -> Finished:
    return run_script("model.py", run, "--look", text, *options)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_what_look_returns(run: Path) -> None:
    done = look(run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(TEXT)} tokens, mean loss ")
    assert done.stdout.endswith(f"the page is {run / 'look.html'}\n")
    data = data_of((run / "look.html").read_text())
    tokens = rungs.load_tokenizer(run).encode(TEXT)
    found = rungs.look(rungs.load_model(run), [tokens])
    assert found.layers is not None
    assert "".join(data["tokens"]) == TEXT.replace(" ", "·").replace("\n", "↵")
    assert data["chosen"][:-1] == data["tokens"][1:]
    np.testing.assert_allclose(data["losses"], found.losses_BS[0], atol=1e-5)
    lower = np.tril_indices(len(tokens))
    weights = np.frombuffer(base64.b64decode(data["weights"]), np.uint8) / 255
    expected = found.layers.weights_LBNST[:, 0][:, :, *lower]
    np.testing.assert_allclose(weights, expected.reshape(-1), atol=0.5 / 255 + 1e-6)
    parts = data["contributions"]
    np.testing.assert_allclose(parts["heads"], found.contributions.heads_LBNS[:, 0], atol=1e-5)
    predictions = data["predictions"]
    assert np.shape(predictions["tokens"]) == (3, len(tokens), 5)
    likeliest = found.predictions.tokens_LBSC[-1, 0, -1, 0]
    shown = predictions["texts"][predictions["tokens"][-1][-1][0]]
    assert shown in (rungs.load_tokenizer(run).decode([likeliest]), f"[{likeliest}]", "·", "↵", "⇥")


def test_the_page_loads_nothing(run: Path) -> None:
    look(run)
    page = (run / "look.html").read_text()
    assert "default-src 'none'" in page
    assert "connect-src 'none'" in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page.split("<script")[0])


def test_a_model_without_layers_has_a_page(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "run", n_layers=0)
    assert look(folder).returncode == 0
    data = data_of((folder / "look.html").read_text())
    assert data["weights"] == ""
    assert len(data["predictions"]["tokens"]) == 1


def refused(done: Finished) -> str:
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    return line


def test_what_does_not_fit_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    assert "65 tokens; a page of this model has at most 64" in refused(look(run, "a" * 65))
    assert "leave out --json" in refused(look(run, TEXT, "--json"))
    assert "no such run folder" in refused(look(tmp_path / "nowhere"))
    untrained = make_run(tmp_path / "untrained").path
    assert "no checkpoint there yet" in refused(look(untrained))
    assert not (untrained / "look.html").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [("", "--look: the value is empty"), ("\udcff", "has an invalid character")],
)
def test_a_text_that_is_none_is_refused_in_one_line(run: Path, text: str, line: str) -> None:
    assert line in refused(look(run, text))


def test_unknown_characters_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "run", vocab_size=4)
    character_tokenizer("abc").save(folder / TOKENIZER_FILE)
    assert look(folder, "abca").returncode == 0
    assert 'the tokenizer has no tokens for "é"' in refused(look(folder, "abcé"))


def test_a_text_without_tokens_is_refused(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    tokenizer = tokenizers.Tokenizer.from_file(str(copy / TOKENIZER_FILE))
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.save(str(copy / TOKENIZER_FILE))
    assert "the text has no token" in refused(look(copy, " "))


def test_a_model_without_tokenizer_is_refused(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / TOKENIZER_FILE).unlink()
    assert "bytes" in refused(look(copy))

"""The code in the README runs, on the solution, and makes a run."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import rungs
from assignment import load

ROOT = Path(__file__).parents[2]
SMALLER = {
    "assignment.student": "assignment.solution",
    "STEPS, SPECIAL = 1000": "STEPS, SPECIAL = 20",
    "d_model=128, num_heads=4, d_ff=344": "d_model=16, num_heads=2, d_ff=24",
    "num_layers=4": "num_layers=1",
    "vocab_size=4096, context_length=128": "vocab_size=300, context_length=16",
}


def test_the_code_trains_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "assignment" / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for part, other in SMALLER.items():
        assert part in code
        code = code.replace(part, other)
    (tmp_path / "text.txt").write_text("she sells sea shells by the sea shore\n" * 90)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    arguments = ["mine.safetensors", "runs/mine", "--tokenizer", "tokenizer"]
    CliRunner().invoke(load.main, arguments, catch_exceptions=False)
    [continued] = rungs.load_generator("runs/mine").continue_texts(["she"], 4)
    assert continued

"""The page as a file: its size, its policy, text that must stay text, which steps are shown."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rungs.cli import charts
from rungs.common.errors import UserError
from rungs.common.helper_process import process_executor
from rungs.report import run_page
from rungs.report.page_data import extreme_rows, stretch_means
from rungs.report.run_page import open_runs, page, page_data
from tests.support import policy_steps
from tests.support.policy_steps import policy_run
from tests.support.recorded_runs import record_run, step


def data_of(content: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', content, re.S)
    assert found is not None
    return json.loads(found[1])


def column(run: dict[str, Any], name: str) -> np.ndarray:
    encoded = run["table"][name]
    if "constant" in encoded:
        return np.full(encoded["length"], encoded["constant"])
    content = base64.b64decode(encoded["base64"])
    return np.frombuffer(content, "<f8" if encoded["bytes"] == 8 else "<f4")


def test_all_steps_of_short_runs_are_there(three_runs: list[Path]) -> None:
    alpha, beta, _ = data_of(page(open_runs(three_runs)))["runs"]
    np.testing.assert_array_equal(column(alpha, "global_step"), range(100))
    np.testing.assert_array_equal(column(alpha, "tokens_seen"), 32 * np.arange(1, 101))
    np.testing.assert_allclose(column(alpha, "seconds"), 0.5 * np.arange(1, 101))
    np.testing.assert_allclose(column(alpha, "train_loss"), 2 + 1 / np.arange(1, 101), rtol=1e-6)
    assert alpha["means"] is None
    assert beta["lineage"]["set"] == {"learning_rate": 0.02}
    assert [event["text"] for event in beta["events"]] == ["resumed", "the best checkpoint"]
    assert beta["figures"]["best_step"] == 190
    assert beta["figures"]["validation_loss"] == 1.81


def test_it_names_the_keys_in_which_runs_differ(three_runs: list[Path]) -> None:
    differences = data_of(page(open_runs(three_runs)))["differences"]
    assert differences == {
        "train.json: learning_rate": {"alpha": 0.01, "beta": 0.02, "gamma": 0.001}
    }


def test_a_task_is_shown_without_keys_that_have_their_default(tmp_path: Path) -> None:
    source = {"source": "parity", "settings": {"max_bits": 16}}
    folders = [
        policy_run(tmp_path / name, [policy_steps.step(0)], tasks=[source | more])
        for name, more in (("a", {}), ("b", {"seed": 1, "max_turns": 8}), ("c", {"seed": 0}))
    ]
    differences = data_of(page(open_runs(folders)))["differences"]
    assert differences["reinforce.json: tasks"] == {
        "a": [source],
        "b": [source | {"seed": 1}],
        "c": [source],
    }


def test_flops_are_those_of_the_plan(
    three_runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 for each weight in a matmul and 12 · L · N · H · S for attention, counted by hand. In a
    process of their own, as for users."""
    monkeypatch.setattr(run_page, "process_executor", process_executor)
    emb, vocabulary, length = 16, 32, 8
    block = 4 * emb * emb + 2 * emb * 4 * emb + emb + 5 * emb  # matrices and biases
    norms = 2 * 2 * emb + 2 * emb
    run = data_of(page(open_runs(three_runs[:1])))["runs"][0]
    assert run["flopsPerToken"] == 6 * (block + norms + vocabulary * emb) + 12 * emb * length


@pytest.mark.long
def test_ten_long_runs_take_less_than_three_megabytes_and_keep_every_spike(tmp_path: Path) -> None:
    random, folders = np.random.default_rng(0), []
    for number in range(10):
        losses = random.normal(3, 0.1, 20_000)
        losses[7_000 + number] = 50
        norms = random.lognormal(size=20_000)
        folders.append(
            record_run(
                tmp_path / f"run-{number}",
                (
                    step(n, train_loss=loss, gradient_norm=norm, tokens_per_second=64 + norm)
                    for n, (loss, norm) in enumerate(zip(losses, norms, strict=True))
                ),
            )
        )
    content = page(open_runs(folders))
    assert len(content.encode()) < 3_000_000
    for number, run in enumerate(data_of(content)["runs"]):
        steps, losses = column(run, "global_step"), column(run, "train_loss")
        assert len(steps) < 20_000
        assert losses[steps == 7_000 + number] == [50]
        assert run["steps"] == 20_000


def test_the_policy_allows_only_what_the_file_has(three_runs: list[Path]) -> None:
    content = page(open_runs(three_runs))
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', content)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    parts = re.findall(r"<script>(.*?)</script>|<style>(.*?)</style>", content, re.S)
    for part in ("".join(pair) for pair in parts):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r"""(src|href)=["'](?!#)""", content.split("<script")[0])


def test_names_and_texts_cannot_end_the_script(tmp_path: Path) -> None:
    attack = "</script><img src=x onerror=alert(1)>{{DATA}}"
    folder = record_run(tmp_path / "run", [step(0)], dataset=attack)
    other = record_run(tmp_path / "other", [step(0)])
    content = page(open_runs([folder, other]))
    assert attack not in content
    assert html.escape(attack) not in content
    assert data_of(content)["differences"]["train.json: dataset"]["run"] == attack


def test_runs_with_the_same_name_are_called_by_their_paths(tmp_path: Path) -> None:
    folders = [record_run(tmp_path / parent / "run", [step(0)]) for parent in "ab"]
    names = [run["name"] for run in data_of(page(open_runs(folders)))["runs"]]
    assert names == [str(folder) for folder in folders]


def test_a_run_without_steps_is_shown_as_such(tmp_path: Path) -> None:
    run = json.loads(page_data(runs := open_runs([record_run(tmp_path / "run", [])]), runs))
    assert run["runs"][0]["steps"] == 0
    assert run["runs"][0]["events"] == []


def test_the_best_is_among_losses_on_the_same_data(tmp_path: Path) -> None:
    steps = [
        step(0, validation_loss=1.0, validation_data="a"),
        step(10, validation_loss=3.0, validation_data="b"),
        step(20, validation_loss=2.0, validation_data="b"),
        step(30, validation_loss=2.5, validation_data="b"),
    ]
    [run] = data_of(page(open_runs([record_run(tmp_path / "run", steps)])))["runs"]
    assert run["figures"]["best_step"] == 20


class TestCommand:
    @pytest.mark.usefixtures("three_runs")
    def test_a_folder_stands_for_the_runs_in_it(self, tmp_path: Path) -> None:
        record_run(tmp_path / "runs" / "new", [])
        target = tmp_path / "pages" / "compare.html"
        result = CliRunner().invoke(
            charts.main, [str(tmp_path / "runs"), "--page", str(target)], catch_exceptions=False
        )
        assert result.output == f"{target}\n"
        names = [run["name"] for run in data_of(target.read_text())["runs"]]
        assert names == ["alpha", "beta", "gamma"]
        assert [path.name for path in target.parent.iterdir()] == ["compare.html"]

    @pytest.mark.parametrize(
        ("options", "line"),
        [
            (["--port", "80"], "--port: needs --watch"),
            (["--samples", "--page", "x.html"], "--table and --samples: go with no other option"),
            (["--table", "csv", "--samples"], "--table and --samples: go with no other option"),
            (["--page", "x.html", "--power-law"], "go with no option of the other charts"),
        ],
    )
    def test_options_that_do_not_go_together(
        self, three_runs: list[Path], options: list[str], line: str
    ) -> None:
        with pytest.raises(UserError, match=line):
            CliRunner().invoke(charts.main, [str(three_runs[0]), *options], catch_exceptions=False)

    def test_a_folder_of_runs_without_steps(self, tmp_path: Path) -> None:
        record_run(tmp_path / "runs" / "new", [])
        with pytest.raises(UserError, match="none of the 1 runs in it has taken a step yet"):
            CliRunner().invoke(
                charts.main, [str(tmp_path / "runs"), "--page", "x.html"], catch_exceptions=False
            )


def test_a_start_after_a_kill_says_so(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "run", [step(0), step(1, resumed=True), step(2)])
    rows = [
        ("start", -1, "started"),
        ("spike", 0, "loss spike"),
        ("start", 0, "resumed after step 0"),
        ("stop", 1, "stopped by a signal"),
        ("start", 1, "resumed after step 1"),
    ]
    lines = [
        json.dumps({"time": "t", "event": event, "step": at, "text": text})
        for event, at, text in rows
    ]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    [run] = data_of(page(open_runs([folder])))["runs"]
    assert [event["text"] for event in run["events"]] == [
        "started",
        "resumed after step 0, having been killed",
        "stopped by a signal",
        "resumed after step 1",
        "the best checkpoint",
    ]


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=200),
    width=st.integers(1, 50),
)
def test_each_stretch_keeps_its_extremes(values: list[float], width: int) -> None:
    column = np.array(values)
    rows = extreme_rows([column], len(column), width)
    assert list(rows) == sorted(set(rows.tolist()))
    assert {0, len(column) - 1} <= set(rows.tolist())
    for start in range(0, len(column), width):
        stretch = column[start : start + width]
        kept = column[[row for row in rows if start <= row < start + width]]
        if np.isfinite(stretch).any():
            assert np.nanmin(kept) == np.nanmin(stretch)
            assert np.nanmax(kept) == np.nanmax(stretch)


def test_a_single_spike_of_two_metrics_stays() -> None:
    loss, norm = np.ones(100_000), np.ones(100_000)
    loss[54_321], norm[777] = 40.0, -3.0
    rows = extreme_rows([loss, norm], 100_000, 1_000)
    assert {54_321, 777} <= set(rows.tolist())
    assert len(rows) <= 5 * 100 + 1


def test_means_leave_out_missing_values() -> None:
    column = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 9.0])
    np.testing.assert_array_equal(stretch_means(column, 2), [2.0, 5.0, np.nan, 9.0])

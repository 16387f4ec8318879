"""The layers on the page: numbers with two digits, of steps that fit."""

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.report.page_data import layers_as_json
from rungs.report.run_page import open_runs, page
from rungs.run import layer_record
from tests.report.test_browser import LOSS, open_page, point_at
from tests.support.recorded_layers import record_layers, statistics_of
from tests.support.recorded_runs import record_run, step


def decoded(encoded: dict[str, Any]) -> np.ndarray:
    halves = np.frombuffer(base64.b64decode(encoded["base64"]), "<u2").astype("<u4")
    return (halves << 16).view("<f4").reshape(encoded["shape"])


def test_numbers_have_two_digits_and_the_range_of_float32() -> None:
    values = np.array([[0, 1e-38, 1.2345, -3e38, np.nan, np.inf, -np.inf, 0.1]])
    row = layer_record.row_of(7, {"dead_units": values})
    found = layers_as_json(row, 10_000)
    assert found["steps"] == [7]
    shown = decoded(found["series"]["dead_units"])[0, 0]
    np.testing.assert_allclose(shown, values[0].astype(np.float32), rtol=0.004)


def test_steps_that_do_not_fit_are_evenly_spaced() -> None:
    rows = [layer_record.row_of(number, {"dead_units": np.ones((1, 8))}) for number in range(1000)]
    found = layers_as_json(np.concatenate(rows), 1000)["steps"]
    assert (found[0], found[-1], len(found)) == (0, 999, 46)
    assert set(np.diff(found)) == {22, 23}


def test_a_page_with_many_layers_stays_small(tmp_path: Path) -> None:
    runs = [record_run(tmp_path / name, map(step, range(2000))) for name in ("one", "two")]
    for run in runs:
        rows = [layer_record.row_of(number, statistics_of(number, 48, 32)) for number in range(400)]
        content = layer_record._as_bytes(np.concatenate(rows))
        (run / "layers.npy").write_bytes(content)
    assert len(page(open_runs(runs)).encode()) < 3_000_000


def test_a_run_without_layers_or_with_another_file_has_none(tmp_path: Path) -> None:
    runs = [record_run(tmp_path / name, map(step, range(3))) for name in ("one", "two")]
    (runs[0] / "layers.npy").write_bytes(b"\x93NUMPY\x02\x00broken")
    shown = [one.as_json(100, 10_000)["layers"] for one in open_runs(runs)]
    assert shown == [None, None]


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Path]:
    """Runs whose last layer jumps at step 60; one has a loss spike before it, at step 57."""
    runs = [
        record_run(
            tmp_path / name,
            (step(number, **({"spike": "seen"} if number == 57 else {})) for number in range(100)),
        )
        for name in ("calm", "spiky")
    ]
    record_layers(runs[0], range(0, 100, 10))
    record_layers(runs[1], range(0, 100, 20), jumps={60: 50.0})
    return runs


def maps(tab: Any) -> list[str]:
    canvases = "[...document.querySelectorAll('#layer-maps canvas')].map(c => c.toDataURL())"
    found: list[str] = tab.evaluate(canvases)
    return found


def test_the_step_of_a_spike_is_one_click_from_the_layers_that_moved(
    tab: Any, two_runs: list[Path], tmp_path: Path
) -> None:
    opened = open_page(tab, two_runs, tmp_path)
    assert opened.locator("#layer-step-value").text_content() == "90"
    opened.get_by_label("Show the layers around step 57 of spiky").click()
    assert opened.locator("#layer-step-value").text_content() == "60"
    first = opened.locator("#layer-moves tbody tr").filter(has_text="spiky").first
    assert first.locator("td").first.text_content() == "3"
    texts = first.locator("td").all_text_contents()
    assert float(texts[4].removeprefix("× ")) == pytest.approx(50 * 2.2 / 1.8, rel=0.02)
    assert "bias" not in opened.locator("#layer-moves").text_content()
    before = maps(opened)
    first.get_by_role("button").click()
    assert maps(opened) != before
    # so is a click on a chart
    point_at(opened, 0.3)
    opened.mouse.down()
    opened.mouse.up()
    assert opened.locator("#layer-step-value").text_content() == "30"


def test_statistics_parts_and_heads_can_be_chosen(
    tab: Any, two_runs: list[Path], tmp_path: Path
) -> None:
    opened = open_page(tab, two_runs, tmp_path)
    choice = opened.locator("#layer-statistic")
    titles = choice.locator("option").all_text_contents()
    assert titles[0] == "update ÷ weight"
    assert len(titles) == 10
    for title in titles:
        choice.select_option(label=title)
        assert len(maps(opened)) == 2
        heads = 2 if title.startswith("attention") else 0
        of_layers = not title.startswith("activation")  # the embedding's
        assert opened.locator("#layer-depth figure").count() == of_layers + heads
    choice.select_option(label="largest singular value")
    parts = opened.locator("#layer-part option").all_text_contents()
    assert parts == ["attention.query.kernel"]
    choice.select_option(label="share of dead units")
    assert not opened.locator("#layer-part").is_visible()
    opened.locator('#run-list li[data-run="calm"] input').uncheck()
    assert len(maps(opened)) == 1


def test_the_value_under_the_mouse_is_that_of_the_file(
    tab: Any, two_runs: list[Path], tmp_path: Path
) -> None:
    opened = open_page(tab, two_runs, tmp_path)
    opened.locator("#layer-statistic").select_option(label="gradient, root mean square")
    canvas = opened.locator("#layer-maps canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    opened.mouse.move(box["x"] + 40 + (box["width"] - 46) * 0.35, box["y"] + 4 + 5)
    note = opened.locator("#layer-maps figcaption small").first.text_content()
    value = np.load(two_runs[0] / "layers.npy")["arrays"]["all"]["gradient_rms"][3, 3]
    assert note.startswith("step 30, layer 3: ")
    assert float(note.rpartition(" ")[2]) == pytest.approx(value, rel=0.01)


def test_the_head_belongs_to_no_layer(tab: Any, two_runs: list[Path], tmp_path: Path) -> None:
    opened = open_page(tab, two_runs, tmp_path)
    opened.locator("#layer-part").select_option("head.kernel")
    assert opened.locator("#layer-depth figure").count() == 0
    canvas = opened.locator("#layer-maps canvas").first
    canvas.hover()
    note = opened.locator("#layer-maps figcaption small").first.text_content()
    assert re.match(r"step \d+: ", note)
    opened.locator("#layer-step").fill("1")
    rows = opened.locator("#layer-moves tbody tr").filter(has_text="head.kernel")
    assert {row.locator("td").first.text_content() for row in rows.all()} == {"–"}


def test_colours_leave_step_0_out(tab: Any, tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", map(step, range(50)))
    record_layers(run, range(0, 50, 10), jumps={0: 1e6})
    opened = open_page(tab, [run], tmp_path)
    opened.locator("#layer-statistic").select_option(label="gradient, root mean square")
    ends = (
        opened.locator("#layer-scale .legend").text_content().replace(", logarithmic", "").split()
    )
    values = np.load(run / "layers.npy")["arrays"]["all"]["gradient_rms"][1:]
    assert [float(end) for end in ends] == pytest.approx([values.min(), values.max()], rel=0.05)


def test_runs_without_layers_have_no_section(opened_plain: Any) -> None:
    assert not opened_plain.locator("#layers").is_visible()


@pytest.fixture
def opened_plain(tab: Any, page_of_three_runs: Path) -> Any:
    tab.goto(page_of_three_runs.as_uri())
    tab.wait_for_selector(LOSS)
    return tab

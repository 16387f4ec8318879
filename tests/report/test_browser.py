"""The page in a real browser: headless Chromium."""

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rungs.report.run_page import PageServer, open_runs, write_page
from tests.support import policy_steps
from tests.support.policy_steps import policy_run
from tests.support.recorded_runs import record_run, step

LOSS = 'figure[data-metric="train_loss"] .chart'


@pytest.fixture
def opened(tab: Any, page_of_three_runs: Path) -> Any:
    """The page of three runs, opened as a file, without smoothing."""
    return show(tab, page_of_three_runs)


def open_page(tab: Any, runs: list[Path], tmp_path: Path) -> Any:
    target = tmp_path / "compare.html"
    write_page(target, open_runs(runs))
    return show(tab, target)


def show(tab: Any, page: Path) -> Any:
    tab.goto(page.as_uri())
    tab.wait_for_selector(".uplot")
    return tab


def pictures(tab: Any) -> list[str]:
    """Return what each chart shows, pixel by pixel."""
    return tab.evaluate("[...document.querySelectorAll('.chart canvas')].map(c => c.toDataURL())")


def shown_values(tab: Any) -> list[dict[str, str]]:
    rows = tab.locator("#readout tbody tr")
    return [
        {name: row.get_attribute(f"data-{name}") for name in ("run", "step", "value")}
        for row in rows.all()
    ]


def step_of(tab: Any, run: str) -> int:
    return next(int(row["step"]) for row in shown_values(tab) if row["run"] == run)


def point_at(tab: Any, share: float, chart: str = LOSS) -> None:
    """Move the mouse to a share of a chart's width."""
    area = tab.locator(f"{chart} .u-over")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    tab.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)


def drag(tab: Any, start: float, end: float) -> None:
    """Select a part of the loss chart."""
    point_at(tab, start)
    tab.mouse.down()
    point_at(tab, (start + end) / 2)
    point_at(tab, end)
    tab.mouse.up()


def test_it_opens_from_a_file(opened: Any) -> None:
    assert opened.title() == "alpha, beta, gamma"
    charts = opened.locator("figure").evaluate_all("all => all.map(one => one.dataset.metric)")
    assert charts[:3] == ["train_loss", "validation_loss", "learning_rate"]
    assert charts[-1] == "validation_loss alone"
    label = opened.locator(LOSS).get_attribute("aria-label")
    assert "alpha ends at 2.01; beta ends at 1.505; gamma ends at 4" in label


def test_the_readout_has_what_metrics_jsonl_has(opened: Any, three_runs: list[Path]) -> None:
    recorded = {
        folder.name: [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        for folder in three_runs
    }
    for share in (0.0, 0.1, 0.37, 0.9):
        point_at(opened, share)
        shown = shown_values(opened)
        assert {row["run"] for row in shown} == {"alpha", "beta", "gamma"}
        for row in shown:
            steps = recorded[row["run"]]
            at = int(row["step"])
            assert float(row["value"]) == pytest.approx(steps[at]["train_loss"], rel=1e-6)
            assert at == min(round(share * 199), len(steps) - 1) or abs(at - share * 199) < 2


def test_zooming_one_chart_zooms_the_others(opened: Any) -> None:
    before = pictures(opened)
    drag(opened, 0.5, 0.6)
    after = pictures(opened)
    *linked, alone = (old != new for old, new in zip(before, after, strict=True))
    assert all(linked)
    assert not alone
    point_at(opened, 0.0)
    assert step_of(opened, "beta") == pytest.approx(100, abs=1)
    point_at(opened, 0.99, 'figure[data-metric="learning_rate"] .chart')
    assert step_of(opened, "beta") == pytest.approx(119, abs=1)
    opened.locator(f"{LOSS} .u-over").dblclick()
    point_at(opened, 0.99)
    assert step_of(opened, "beta") > 190


def test_a_run_can_be_hidden(opened: Any) -> None:
    opened.locator('#run-list li[data-run="gamma"] input').uncheck()
    point_at(opened, 0.1)
    assert {row["run"] for row in shown_values(opened)} == {"alpha", "beta"}
    assert "gamma" not in opened.locator(LOSS).get_attribute("aria-label")
    opened.get_by_label("Show only gamma").click()
    point_at(opened, 0.1)
    assert {row["run"] for row in shown_values(opened)} == {"gamma"}


def test_the_table_sorts_by_any_column(opened: Any) -> None:
    def order() -> list[str]:
        rows = opened.locator("#results-table tbody tr")
        return rows.evaluate_all("all => all.map(row => row.dataset.run)")

    opened.get_by_role("button", name="train.json: learning_rate").click()
    assert order() == ["gamma", "alpha", "beta"]
    opened.get_by_role("button", name="train.json: learning_rate").click()
    assert order() == ["beta", "alpha", "gamma"]
    opened.get_by_role("button", name="validation loss", exact=True).click()
    assert order()[0] == "beta"  # those without one come last


def test_it_can_be_used_with_the_keyboard(opened: Any) -> None:
    opened.locator(LOSS).focus()
    opened.keyboard.press("Home")
    assert {row["step"] for row in shown_values(opened)} == {"0"}
    opened.keyboard.press("End")
    assert ("beta", "199") in [(row["run"], row["step"]) for row in shown_values(opened)]
    before = pictures(opened)
    opened.keyboard.press("+")
    assert pictures(opened) != before
    opened.keyboard.press("0")
    opened.keyboard.press("End")
    assert ("beta", "199") in [(row["run"], row["step"]) for row in shown_values(opened)]


@pytest.mark.parametrize(
    ("axis", "last"), [("tokens", 6400), ("seconds", 100), ("flops", None), ("step", 199)]
)
def test_curves_against_other_axes(opened: Any, axis: str, last: float | None) -> None:
    opened.locator("#x-axis").select_option(axis)
    opened.locator("#log-x").check()
    opened.locator(LOSS).focus()
    opened.keyboard.press("End")
    text = opened.locator('#readout tr[data-run="beta"]').inner_text()
    assert "step 199" in text
    if last and axis != "step":
        assert f"({last:,})" in text


def test_smoothing_is_a_running_mean(tab: Any, tmp_path: Path) -> None:
    losses = [3.0 if number % 2 else 1.0 for number in range(400)]
    folder = record_run(
        tmp_path / "run", (step(n, train_loss=loss) for n, loss in enumerate(losses))
    )
    opened = open_page(tab, [folder], tmp_path)
    before = pictures(opened)
    opened.locator("#smoothing").fill("10")
    assert opened.locator("#smoothing-value").inner_text() == "mean of 10 % of the steps"
    assert pictures(opened) != before
    point_at(opened, 0.5)  # the readout has what was recorded
    assert shown_values(opened)[0]["value"] in ("1", "3")


def test_text_is_never_executed(tab: Any, tmp_path: Path) -> None:
    attack = "</script><script>console.log('run')</script><img src=x onerror=console.log(1)>"
    runs = [
        record_run(tmp_path / "a<script><b onclick=x>", [step(0), step(1)], dataset=attack),
        record_run(tmp_path / "b", [step(0)]),
    ]
    sample = {
        "time": "2026-01-01T00:00:00+00:00",
        "step": 1,
        "checkpoint": "c",
        "prompt": attack,
        "temperature": 0,
        "seed": 0,
        "text": attack,
        "tokens": 3,
        "ended": False,
    }
    (runs[0] / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    opened = open_page(tab, runs, tmp_path)
    assert attack in opened.locator("#sample-texts").inner_text()
    assert attack in opened.locator("#results-table").inner_text()
    assert "a<script><b onclick=x>" in opened.title()


def test_samples_are_a_timeline(tab: Any, tmp_path: Path) -> None:
    folder = record_run(tmp_path / "run", map(step, range(21)))
    texts = {0: "a a a a", 10: "the cat a sat", 20: "the cat sat down"}
    lines = [
        {"time": "", "step": at, "checkpoint": "c", "prompt": "Once", "temperature": kind,
         "seed": 0, "text": f"{text}{' warm' * kind}", "tokens": 4, "ended": False}
        for at, text in texts.items()
        for kind in (0, 1)
    ]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened = open_page(tab, [folder], tmp_path)
    said = opened.locator(".said")
    assert said.inner_text() == "Oncethe cat sat down"
    assert said.locator("mark").all_inner_texts() == ["down"]
    point_at(opened, 0.5)
    opened.mouse.down()
    opened.mouse.up()
    assert said.inner_text() == "Oncethe cat a sat"
    assert said.locator("mark").all_inner_texts() == ["the", "cat", "sat"]
    opened.locator("#sample-step").fill("0")
    assert said.locator("mark").count() == 0
    opened.locator("#sample-kind").select_option("sampled")
    assert said.inner_text() == "Oncea a a a warm"


def test_lineage_and_events_are_told_in_words(opened: Any) -> None:
    tree = opened.locator("#lineage-tree").inner_text()
    assert tree.split() == ["alpha", "beta", "learning_rate", "=", "0.02"]
    rows = opened.locator("#events-table tbody tr").all_inner_texts()
    assert any("beta" in row and "51" in row and "resumed" in row for row in rows)


def test_a_run_without_steps(tab: Any, tmp_path: Path) -> None:
    tab.goto("about:blank")
    target = tmp_path / "page.html"
    write_page(target, open_runs([record_run(tmp_path / "new", [])]))
    tab.goto(target.as_uri())
    assert "No steps are recorded yet." in tab.locator("#chart-grid").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(
    chromium: Any, three_runs: list[Path], tmp_path: Path, scheme: str
) -> None:
    context = chromium.new_context(
        viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True, color_scheme=scheme
    )
    opened = open_page(context.new_page(), three_runs, tmp_path)
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360
    assert opened.evaluate("document.documentElement.dataset.theme") == scheme
    context.close()


def test_reinforcement_learning_is_about_pass_at_1(tab: Any, tmp_path: Path) -> None:
    """The loss is lowest after step 9, pass@1 highest after step 3, where `best` points."""
    rates = {0: 0.25, 3: 0.75, 6: 0.5, 9: 0.625}
    steps = [
        dataclasses.replace(
            policy_steps.step(n),
            train_loss=-n / 100,
            validation=policy_steps.validation(rates[n]) if n in rates else None,
        )
        for n in range(10)
    ]
    learnt = policy_run(tmp_path / "learnt", steps)
    opened = open_page(tab, [learnt], tmp_path)
    drawn = "[...document.querySelectorAll('figure')].map(figure => figure.dataset.metric)"
    assert opened.evaluate(drawn)[:3] == ["validation.pass_at.1", "reward", "learning_rate"]
    assert "train_loss" not in opened.evaluate(drawn)
    starred = [row for row in opened.locator("#events-table tr").all_inner_texts() if "★" in row]
    assert [row.split("\t")[1] for row in starred] == ["3"]
    opened.get_by_text("Metrics", exact=True).click()
    opened.get_by_label("validation: pass@2").check()
    opened.get_by_label("train loss").check()
    label = opened.locator('figure[data-metric="validation.pass_at.2"] .chart')
    assert label.get_attribute("aria-label") == "validation: pass@2: learnt ends at 0.825"
    assert not opened.locator('figure[data-metric="train_loss"] input').is_checked()  # log

    trained = record_run(tmp_path / "trained", map(step, range(21)))
    opened = open_page(tab, [learnt, trained], tmp_path)
    heads = opened.locator("#results-table thead th").all_inner_texts()
    learnt_cells, trained_cells = (
        dict(zip(heads, row.locator("th, td").all_inner_texts(), strict=True))
        for row in opened.locator("#results-table tbody tr").all()
    )
    shown = ("best pass@1", "best loss", "best at step")
    assert [learnt_cells[name] for name in shown] == ["0.75", "–", "3"]
    assert [trained_cells[name] for name in shown] == ["–", "2.0476", "20"]
    assert "train_loss" in opened.evaluate(drawn)


class TestWatch:
    @pytest.fixture
    def server(self, three_runs: list[Path]) -> Iterator[PageServer]:
        with PageServer(open_runs(three_runs)) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield server
            server.shutdown()
            thread.join()

    def test_a_step_just_taken_appears(
        self, tab: Any, server: PageServer, three_runs: list[Path]
    ) -> None:
        tab.goto(server.address)
        tab.wait_for_selector(".uplot")
        tab.get_by_label("Show only gamma").click()
        tab.locator(LOSS).focus()
        with (three_runs[2] / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step(50, train_loss=0.125)) + "\n")
        tab.wait_for_selector(f'{LOSS}[aria-label="train loss: gamma ends at 0.125"]')
        assert tab.locator("#status").inner_text() == "Live"
        assert tab.evaluate(f"document.activeElement.matches({LOSS!r})")

    def test_only_runs_that_changed_are_sent(
        self, server: PageServer, three_runs: list[Path]
    ) -> None:
        first = json.loads(server.changes(0))
        with (three_runs[0] / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step(100)) + "\n")
        later = json.loads(server.changes(first["version"]))
        assert [run["name"] for run in later["runs"]] == ["alpha"]
        assert json.loads(server.changes(later["version"]))["runs"] == []


def test_losses_on_different_datasets_are_said_not_to_compare(
    tab: Any, page_of_two_datasets: Path
) -> None:
    show(tab, page_of_two_datasets)
    assert "compare bits per byte on one text" in tab.inner_text("#caution")
    metrics = tab.evaluate("[...document.querySelectorAll('figure')].map(f => f.dataset.metric)")
    assert {"bits_per_byte", "bits_per_byte alone"} <= set(metrics)


def test_losses_on_one_dataset_need_no_caution(opened: Any) -> None:
    assert opened.is_hidden("#caution")
    assert opened.locator('figure[data-metric="bits_per_byte"]').count() == 0


def test_the_table_of_keys_fits_a_laptop(tab: Any, page_of_two_datasets: Path) -> None:
    tab.set_viewport_size({"width": 1280, "height": 900})
    show(tab, page_of_two_datasets)
    widths = "[...document.querySelectorAll('.scroll')].map(s => s.scrollWidth - s.clientWidth)"
    assert tab.evaluate(widths) == [0, 0, 0]


def test_a_logarithmic_axis_of_less_than_a_decade_has_round_numbers(
    tab: Any, page_of_two_datasets: Path
) -> None:
    tab.add_init_script(
        """window.drawn = new Set();
        const fill = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
          drawn.add(text);
          return fill.call(this, text, ...place);
        };"""
    )
    show(tab, page_of_two_datasets)
    of_the_validation_loss = ["3", "3.2", "3.4", "3.6", "3.8", "4"]
    tab.wait_for_function(f"{of_the_validation_loss}.every((text) => drawn.has(text))")

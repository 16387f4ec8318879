"""The page of `model.py --look` in a real browser: headless Chromium."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_script
from tests.support.layered_model import write_model

TEXT = "one two one two"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_model(tmp_path_factory.mktemp("look") / "run", n_heads=4)
    assert run_script("model.py", run, "--look", TEXT).returncode == 0
    return run / "look.html"


@pytest.fixture
def opened(tab: Any, page: Path) -> Any:
    tab.goto(page.as_uri())
    return tab


def test_a_token_is_chosen_by_click_and_by_key(opened: Any) -> None:
    tokens = opened.locator("#tokens button")
    assert tokens.all_text_contents() == list(TEXT.replace(" ", "·"))
    tokens.nth(4).click()
    assert opened.locator("#chosen").text_content().startswith("After t came w: the model gave it")
    opened.keyboard.press("ArrowRight")
    assert opened.locator('#tokens [aria-selected="true"]').text_content() == "w"
    assert opened.locator("#sum").text_content().startswith("The logit of o is ")
    tokens.last.click()
    assert "the last token, the likeliest is" in opened.locator("#chosen").text_content()


def test_a_head_is_chosen_from_its_map_and_its_contribution(opened: Any) -> None:
    heads = opened.locator("#heads button")
    assert heads.count() == 8
    heads.nth(5).click()
    assert opened.locator("#map-title").text_content() == "layer 1 head 1"
    opened.locator("#parts button").nth(2).click()
    assert opened.locator("#map-title").text_content() == "layer 0 head 2"
    assert heads.nth(2).get_attribute("aria-pressed") == "true"
    opened.locator("#map-canvas").hover(position={"x": 5, "y": 200})
    assert ' to token 0, "o": ' in opened.locator("#map-readout").text_content()


def test_the_map_has_its_tokens_beside_it_and_a_frame_around_the_chosen_row(opened: Any) -> None:
    opened.locator("#tokens button").nth(4).click()
    for side in ("#map-rows", "#map-columns"):
        assert opened.locator(f"{side} span").all_text_contents() == list(TEXT.replace(" ", "·"))
        assert opened.locator(f"{side} .chosen").text_content() == "t"
    frame, cells = (opened.locator(name).bounding_box() for name in ("#map-row", "#map-canvas"))
    row = cells["height"] / len(TEXT)
    assert frame["y"] == pytest.approx(cells["y"] + 4 * row - 2, abs=0.5)
    assert frame["height"] == pytest.approx(row + 4, abs=0.5)


def test_predictions_are_shown_after_each_layer(opened: Any) -> None:
    rows = opened.locator("#candidates tbody tr")
    assert rows.locator("th").all_text_contents() == ["embedding", "layer 0", "layer 1"]
    assert rows.first.locator("td").count() == 6
    opened.locator("#lens summary").click()
    opened.wait_for_selector("#lens-table tbody button")
    assert opened.locator("#lens-table tbody button").count() == 3 * len(TEXT)


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_screen(opened: Any, width: int) -> None:
    opened.set_viewport_size({"width": width, "height": 900})
    opened.locator("#theme").click()
    assert opened.evaluate("document.documentElement.scrollWidth") <= width

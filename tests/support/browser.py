"""A browser to look at pages with; a `conftest.py` imports its fixtures."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Headless Chromium. Its own downloads are not used: the system's Chromium is."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine; on Debian: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium: Any) -> Iterator[Any]:
    """A tab; the test fails if a page in it logs an error or loads anything but itself."""
    context = chromium.new_context(viewport={"width": 1300, "height": 900})
    page, problems = context.new_page(), []

    def note_failure(request: Any) -> None:
        # a script gives up a request itself; seen on busy machines after the last of a stream
        if (request.resource_type, request.failure) != ("fetch", "net::ERR_ABORTED"):
            problems.append(f"{request.url}: {request.failure}")

    page.set_default_timeout(60_000)
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", note_failure)
    yield page
    page.evaluate("0")  # what happened before has been reported when this is answered
    found = [*problems]
    context.close()
    assert not found, found

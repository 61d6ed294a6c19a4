"""A Chromium for the tests of the page."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

AXE = Path("build/page/node_modules/axe-core/axe.min.js")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium, started when the first test of a file asks for it.

    Not longer: Playwright keeps an event loop running, and other tests run their own.
    """
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium is not installed: on Debian, apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program)
        yield chromium
        chromium.close()


@pytest.fixture
def axe() -> str:
    """The source of axe-core, which finds what people with assistive technology cannot use."""
    path = Path(__file__).parents[2] / AXE
    if not path.exists():
        pytest.skip("axe-core is not there: `make check-page` fetches it with npm")
    return path.read_text(encoding="utf-8")

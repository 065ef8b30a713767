"""The dashboard in a real Chromium, as people use it: by what they see, and by keyboard."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from fleet import WAIT_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = shutil.which("chromium")
PHONE, DESK = (360, 740), (1_440, 900)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's; a test without it is skipped."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One page, what it complained of, and how it looks."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT_S * 1_000.0)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _on_console(self, message: Any) -> None:  # Any: playwright's own
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def go(self, view: str) -> None:
        """To one of its views, by its link."""
        self.page.click(f"nav a[href='#{view}']")
        self.page.wait_for_selector(f"#view-{view}:not([hidden])")

    def wait_live(self) -> None:
        self.page.wait_for_selector("#link.good")

    def wait_text(self, selector: str, text: str) -> None:
        self.page.locator(selector, has_text=text).first.wait_for()

    def rows(self, view: str) -> list[str]:
        return self.page.locator(f"#view-{view} tbody tr").all_inner_texts()

    def views(self) -> list[str]:
        """Those that are offered."""
        return self.page.locator("nav a:visible").all_inner_texts()

    def focused(self) -> str:
        """The text of what has the focus."""
        return self.page.evaluate("document.activeElement.innerText")

    def assert_fits(self) -> None:
        """Nothing sticks out to the right."""
        width, screen = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= screen, f"{width} px on a screen of {screen}"
        stray = self.page.evaluate(
            "[...document.querySelectorAll('main *, header *, #figures *, dialog[open] *')]"
            ".filter(e => e.getClientRects().length"
            " && e.getBoundingClientRect().right > innerWidth + 1)"
            ".map(e => e.tagName + '.' + e.className)"
        )
        hidden = ("THEAD.", "TR.", "TH.", "TH.number")  # of a phone's tables, for readers by ear
        assert [one for one in stray if one not in hidden] == []


@contextlib.contextmanager
def visit(
    browser: Browser, url: str, size: tuple[int, int] = DESK, scheme: Any = "light"
) -> Iterator[Visit]:
    """A browser of somebody who was never here."""
    width, height = size
    context: BrowserContext = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme
    )
    try:
        page = context.new_page()
        seen = Visit(page)
        page.goto(url)
        yield seen
    finally:
        context.close()

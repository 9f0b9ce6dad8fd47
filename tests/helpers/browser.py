"""Debian's chromium, driven by playwright, for tests of the live page.

Without chromium the tests are skipped with a line that says so; in CI (the variable CI is set) they fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import axe_playwright_python
from playwright.sync_api import Browser, Page, expect, sync_playwright
from programs import find_program
from waiting import HANG_S

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-precise-memory-info",
)  # fmt: skip
WIDE, NARROW = 1400, 400
_HANG_MS = HANG_S * 1000
expect.set_options(timeout=_HANG_MS)
_AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"


@contextmanager
def running_browser() -> Iterator[Browser]:
    path = find_program("chromium", "chromium-browser", "google-chrome", needed_by="the tests of the live page")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, headless=True, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class LivePage:
    """A tab at the live page of a service. `check()` fails if anything went wrong in it, or left its host."""

    def __init__(self, browser: Browser, url: str, *, width: int = WIDE, scheme: str = "light") -> None:
        self.url = url
        self._context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        self.tab: Page = self._context.new_page()
        self.tab.set_default_timeout(_HANG_MS)
        self._wrong: list[str] = []
        self.tab.on("console", lambda message: self._note(message.type, message.text))
        self.tab.on("pageerror", lambda error: self._wrong.append(f"page error: {error}"))
        self.tab.on("request", lambda request: self._note_request(request.url))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self._wrong.append(f"console {kind}: {text}")

    def _note_request(self, url: str) -> None:
        if urlsplit(url).netloc != urlsplit(self.url).netloc:
            self._wrong.append(f"a request to another host: {url}")

    def open(self, view: str) -> Page:
        """Go to a view and wait until it shows the status."""
        self.tab.goto(f"{self.url}/ui/#{view}")
        self.tab.wait_for_selector("#health")
        return self.tab

    def faults(self) -> list[str]:
        """Serious accessibility faults that axe-core finds now."""
        self.tab.evaluate(_AXE.read_text())
        found: dict[str, Any] = self.tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
        return [f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:160]}" for each in serious]

    def check(self) -> None:
        assert self._wrong == [], self._wrong

    def close(self) -> None:
        self._context.close()

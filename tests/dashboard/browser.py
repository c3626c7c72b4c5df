"""A person at the dashboard: Debian's Chromium without a window, driven by selenium.

Also what takes the pictures of docs/dashboard.md:

    python tests/dashboard/browser.py http://127.0.0.1:8501 docs/images
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    StaleElementReferenceException,
)
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

T = TypeVar("T")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
)
WAIT_S = 60.0  # a busy machine takes long for a page; nothing waits longer than it must
TALLEST = 6000  # pixels of a picture
# Rules of the accessibility checker that only streamlit's own table breaks: it gives the
# cells of every table on a page the same ids.
NOT_OURS = ("duplicate-id", "duplicate-id-active", "duplicate-id-aria")


class Browser:
    def __init__(self, url: str, *, zone: str = "Europe/Berlin") -> None:
        """`url`: the dashboard; `zone`: the viewer's time zone."""
        self.url = url
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in FLAGS:
            options.add_argument(flag)
        self.driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        self.driver.set_script_timeout(WAIT_S)
        self.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": zone})
        self.look()

    def close(self) -> None:
        self.driver.quit()

    def look(self, width: int = 1280, theme: str = "light", height: int = 900) -> None:
        """As a viewer with a screen of this width and this theme of the system."""
        self.width = width
        self._size(height)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def open(self, page: str, **query: object) -> None:
        parts = [f"page={page.replace(' ', '+')}", *(f"{k}={v}" for k, v in query.items())]
        self.driver.get(f"{self.url}/?{'&'.join(parts)}")
        self.wait_for("online_sao")
        self.settle()

    def settle(self) -> None:
        """Until nothing on the page is still being drawn."""
        busy = (By.CSS_SELECTOR, "[data-testid=stSkeleton], [data-testid=stStatusWidget]")
        quiet_since = time.monotonic()

        def quiet() -> bool:
            nonlocal quiet_since
            if self.driver.find_elements(*busy):
                quiet_since = time.monotonic()
            return time.monotonic() - quiet_since > 0.7

        self.until(quiet, "the page to come to rest")

    def until(self, ask: Callable[[], T], what: str) -> T:
        """The first true answer of `ask`; pages are redrawn while they are looked at."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                answer = ask()
            except (StaleElementReferenceException, ElementClickInterceptedException):
                answer = None
            if answer:
                return answer
            time.sleep(0.1)
        raise AssertionError(f"waited {WAIT_S:.0f} s for {what}; the page says:\n{self.text()}")

    def text(self) -> str:
        return self.driver.find_element(By.TAG_NAME, "body").text

    def wait_for(self, words: str) -> None:
        self.until(lambda: words in self.text(), f"'{words}'")

    def tile(self, label: str) -> str:
        """The figure in the tile whose label begins so."""

        def read() -> str | None:
            for tile in self.driver.find_elements(By.CSS_SELECTOR, "[data-testid=stMetric]"):
                if tile.text.startswith(label):
                    value = "[data-testid=stMetricValue]"  # small print may stand under it
                    return next(
                        (found.text for found in tile.find_elements(By.CSS_SELECTOR, value)), None
                    )
            return None

        return self.until(read, f"the tile '{label}'")

    def press(self, label: str) -> None:
        """A button by its words."""

        def try_it() -> bool:
            for button in self.driver.find_elements(By.TAG_NAME, "button"):
                if button.text.split("\n")[-1].strip() == label and button.is_enabled():
                    self.driver.execute_script(
                        "arguments[0].scrollIntoView({block: 'center'})", button
                    )
                    button.click()
                    return True
            return False

        self.until(try_it, f"the button '{label}'")

    def enter(self, label: str, text: str) -> None:
        """Into the field (or the choice) of this label, and Enter."""
        found = (By.CSS_SELECTOR, f"input[aria-label^='{label}']")
        field = self.until(lambda: self.driver.find_elements(*found), f"the field '{label}'")[0]
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", field)
        field.click()
        field.send_keys(text)
        field.send_keys(Keys.ENTER)
        self.settle()

    def chart_texts(self, number: int = 0) -> list[str]:
        """What is written in a chart: its axes, legend and bands."""
        found = (By.CSS_SELECTOR, "[data-testid=stVegaLiteChart] svg")

        def texts() -> list[str]:
            charts = self.driver.find_elements(*found)
            return charts[number].text.splitlines() if number < len(charts) else []

        return self.until(texts, f"chart {number}")

    def watch_charts(self) -> None:
        """From now on, count the frames in which one of the charts is missing."""
        self.driver.execute_script(
            """
            const drawn = () =>
                document.querySelectorAll('[data-testid=stVegaLiteChart] svg').length;
            const seen = window.watched = {frames: 0, missing: 0, charts: drawn()};
            (function look() {
                seen.frames += 1;
                if (drawn() < seen.charts) seen.missing += 1;
                requestAnimationFrame(look);
            })();
            """
        )

    def watched(self) -> dict[str, int]:
        """frames looked at, frames with a chart `missing`, and the number of `charts`."""
        found: dict[str, int] = self.driver.execute_script("return window.watched")
        return found

    def picture(self, path: Path) -> None:
        """The whole page, as far down as it goes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        seen = 0
        for _ in range(5):  # what comes into view is drawn then, and may be taller
            tall = self.driver.execute_script(
                "return document.querySelector('[data-testid=stMain]').scrollHeight"
            )
            if tall <= seen:
                break
            seen = min(max(int(tall), 600), TALLEST)
            self._size(seen)
            self.settle()
        self.driver.save_screenshot(str(path))
        self._size(900)

    def violations(self) -> list[str]:
        """What the accessibility checker finds: text contrast, labels, headings, roles."""
        from axe_core_python.selenium import Axe

        rules = {rule: {"enabled": False} for rule in NOT_OURS}
        options = repr({"rules": rules}).replace("False", "false")
        axe = Axe()
        self.driver.execute_script(axe.axe_script)
        found: dict[str, Any] = self.driver.execute_async_script(
            f"const done = arguments[arguments.length - 1]; axe.run({options}).then(done)"
        )
        assert len(found["passes"]) > 10  # it did look
        return [
            f"{violation['id']}: {node['html'][:150]} {node.get('failureSummary', '')}"
            for violation in found["violations"]
            for node in violation["nodes"]
        ]

    def _size(self, height: int) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": self.width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )


PICTURES: tuple[tuple[str, str, int, str], ...] = (  # name, page, width, theme
    ("dashboard-live-light", "Live", 1280, "light"),
    ("dashboard-live-dark", "Live", 1280, "dark"),
    ("dashboard-live-phone-dark", "Live", 390, "dark"),
    ("dashboard-health", "Learning health", 1280, "light"),
    ("dashboard-rollouts-dark", "Rollouts", 1280, "dark"),
    ("dashboard-versions", "Versions", 1280, "light"),
    ("dashboard-runs", "Runs", 1280, "light"),
    ("dashboard-controls", "Controls", 1280, "light"),
)
OPENED = 421  # a rollout of the generated store that was learned from, with a masked token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pages", nargs="*", help="only pictures of these pages")
    parser.add_argument("--every", action="store_true", help="each page in each size and theme")
    arguments = parser.parse_args()
    pictures = PICTURES
    if arguments.every:
        pages = dict.fromkeys(page for _, page, _, _ in PICTURES)
        pictures = tuple(
            (f"{page.lower().replace(' ', '-')}-{width}-{theme}", page, width, theme)
            for page in pages
            for width in (1280, 390)
            for theme in ("light", "dark")
        )
    browser = Browser(arguments.url)
    try:
        for name, page, width, theme in pictures:
            if arguments.pages and page not in arguments.pages:
                continue
            browser.look(width, theme)
            browser.open(page, **({"rollout": OPENED} if page == "Rollouts" else {}))
            path = arguments.folder / f"{name}.png"
            browser.picture(path)
            # 256 colours are enough for a page, and a third of the bytes
            Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
    finally:
        browser.close()


if __name__ == "__main__":
    main()

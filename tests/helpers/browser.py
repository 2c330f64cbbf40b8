"""A real browser without a window, for pages that the package writes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium of the system, closed at the end; skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, which the extra [test] has")
    places = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    binary, driver = next(filter(None, places), None), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(made)
    finally:
        made.quit()


class Browser:
    """Opens pages, and reads and uses them as their readers do."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, path: Path, dark: bool = False, width: int = 1200) -> None:
        """Opens a file, for a reader who prefers dark colours or not, in a window of this width."""
        wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(path.as_uri())

    def run(self, script: str) -> Any:
        """Value of a script's expression."""
        return self.driver.execute_script(f"return {script}")

    def count(self, selector: str) -> int:
        return self.run(f"document.querySelectorAll('{selector}').length")

    def text(self) -> str:
        """The text that a page shows, without its marks."""
        return self.run(
            "(() => { const copy = document.getElementById('text').cloneNode(true);"
            "copy.querySelectorAll('.mark').forEach((mark) => mark.remove()); return copy.textContent; })()"
        )

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def press(self, *keys: str) -> None:
        """Presses keys by their names in Selenium, such as "TAB" and "RIGHT"."""
        webdriver = pytest.importorskip("selenium.webdriver")
        webdriver.ActionChains(self.driver).send_keys(*(getattr(webdriver.Keys, key) for key in keys)).perform()

    def hover(self, selector: str) -> None:
        webdriver = pytest.importorskip("selenium.webdriver")
        webdriver.ActionChains(self.driver).move_to_element(self.find(selector)).perform()

    def complaints(self) -> list[dict]:
        """What the console has said since the last question."""
        return self.driver.get_log("browser")

    def spoken(self) -> list[tuple[str, str]]:
        """Role and name of all that a screen reader meets."""
        nodes = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        heard = [node for node in nodes if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in heard]

"""Reports in a real browser, opened from a file: `make browser` runs it where Chromium is installed."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from eyas.cli.app import app
from eyas.plan.report import render_report
from reports.hostile import hostile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver: see `make browser`"
    ),
]

SMALL_TEXT = """
return [...document.querySelectorAll('body *')].filter((part) => {
  if (part.closest('script') || !part.getClientRects().length) return false;
  if (![...part.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) return false;
  const svg = part.closest('svg'), box = svg && svg.viewBox.baseVal.width;
  const scale = box ? svg.getBoundingClientRect().width / box : 1;
  return parseFloat(getComputedStyle(part).fontSize) * scale < 12;
}).map((part) => part.outerHTML);
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium: see `make browser`")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("chromium")
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan whose every name tries to be a script."""
    file = tmp_path_factory.mktemp("page") / "plan.html"
    result = CliRunner().invoke(app, ["plan", "smollm2", "--gpu", "l4", "--users", "16", "--json"])
    file.write_text(render_report(hostile(json.loads(result.stdout))), encoding="utf-8")
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_fits_its_window_without_errors(driver: Any, page: Path, width: int, scheme: str) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get(page.as_uri())
    root = "document.documentElement"
    assert driver.execute_script(f"return innerWidth === {width} && {root}.scrollWidth <= {root}.clientWidth")
    assert driver.execute_script(SMALL_TEXT) == []
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(21, 23, 28)") == (scheme == "dark")
    assert driver.get_log("browser") == []


def test_buttons_copy_and_links_open_details(driver: Any, page: Path) -> None:
    driver.get(page.as_uri())
    driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    button = driver.find_element("css selector", "button[data-copy=memory-table]")
    button.send_keys("\n")
    read = "const done = arguments[0]; setTimeout(() => navigator.clipboard.readText().then(done, done), 300)"
    copied = driver.execute_async_script(read)
    assert copied.splitlines()[0] == "what\tbytes\tshare"
    assert button.text == "Copied"
    driver.get(f"{page.as_uri()}#record")
    assert driver.execute_script("return document.getElementById('record').closest('details').open")


def test_the_policy_blocks_foreign_scripts(driver: Any, page: Path) -> None:
    driver.get(page.as_uri())
    smuggle = "const s = document.createElement('script'); s.textContent = 'window.bad = 1'; document.body.append(s);"
    assert driver.execute_script(f"{smuggle} return window.bad === undefined")
    assert any("Content Security Policy" in entry["message"] for entry in driver.get_log("browser"))

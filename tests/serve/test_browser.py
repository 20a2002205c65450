"""The page in a real browser: what its users see and do. `make browser` runs it where Chromium is installed."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from eyas.engine.speculation.step_report import RoundOutcome, StepReport
from eyas.serve.transport.server import Server, listen, url_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,900",
]  # fmt: skip

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver: see `make browser`"
    ),
]


class Browser:
    """A browser, and what a person does with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.wait("return document.getElementById('state').dataset.state !== 'unknown'")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, seconds: float = 20) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"waited in vain: {script}"
            time.sleep(0.02)
        return found

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def shows(self, selector: str) -> bool:
        return bool(self.one(selector).is_displayed())

    def set(self, field: str, value: Any) -> None:
        """Give a field a value as if by hand."""
        script = "const [id, value] = arguments, field = document.getElementById(id); field.value = value;"
        self.run(script + "field.dispatchEvent(new Event('input', {bubbles: true}))", field, value)

    def ask(self, message: str) -> None:
        self.one("#message").send_keys(message + "\n")

    def answered(self) -> None:
        self.wait("return !document.getElementById('send').hidden")

    def complaints(self) -> list[Any]:
        """What the console says since the last time."""
        return list(self.driver.get_log("browser"))

    def hosts(self) -> set[str]:
        """Whom the browser asked for something since the last time."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return {urlsplit(url).hostname or url for url in urls}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium: see `make browser`")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@contextmanager
def running(client: Any) -> Iterator[str]:
    """The address of an application that listens."""
    listener = listen("127.0.0.1", 0)
    server = Server(client.application)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield url_of(listener) + "/"
    finally:
        server.handle_exit(15, None)
        thread.join(30)
        client.application.context.admission.draining = False  # other tests ask the same application


@pytest.fixture
def page(browser: Browser, client: Any) -> Iterator[Browser]:
    """The page of the tiny server; afterwards nobody complained and nobody else was asked for anything."""
    with running(client) as url:
        browser.open(url)
        browser.complaints(), browser.hosts()
        browser.open(url)
        yield browser
        assert not browser.complaints()
        assert browser.hosts() == {"127.0.0.1"}


def test_an_answer_is_painted_by_origin(page: Browser, client: Any) -> None:
    page.set("speculation", "fixed")
    page.set("depth", 3)
    page.set("max-tokens", 40)
    page.ask("Hello")
    page.answered()
    ask = {"max_tokens": 40, "speculative": {"mode": "fixed", "depth": 3, "details": True}}
    (choice,) = client.chat(**ask).json["choices"]
    assert page.text(".painted") == choice["message"]["content"]
    depths, texts = choice["speculative"]["depths"], choice["speculative"]["texts"]
    assert any(depths)
    origins = [f"draft depth {depth}" if depth else "the target" for depth in depths]
    painted = page.run("return [...document.querySelectorAll('.painted .tok')].map(t => [t.className, t.title])")
    ends = [place for place, text in enumerate(texts) if text]  # a token without text is told of with the next one
    for (kind, title), first, last in zip(painted, [-1, *ends], ends, strict=False):
        assert f"d{depths[last]}" in kind.split()
        assert title.split(": ")[-1] == ", ".join(origins[first + 1 : last + 1])
    rows = page.run("return [...document.querySelectorAll('.tokens tbody tr')].map(r => r.cells[3].textContent)")
    assert rows == origins
    figures = dict(page.run("return [...document.querySelectorAll('.figures div')].map(d => [...d.children].map(c => c.textContent))"))  # fmt: skip  # noqa: E501
    assert float(figures["tokens/s"]) > 0
    assert float(figures["acceptance length"]) == pytest.approx(choice["speculative"]["acceptance_length"], abs=0.006)
    assert figures["tokens"] == str(len(depths))
    assert choice["message"]["content"] in page.text("#announcer")


def test_what_was_said_goes_back_and_can_be_forgotten(page: Browser, client: Any) -> None:
    page.set("max-tokens", 12)
    page.set("system", "Be brief.")
    page.ask("Hello")
    page.answered()
    first = page.text(".painted")
    page.ask("And then?")
    page.answered()
    turns = [("system", "Be brief."), ("user", "Hello"), ("assistant", first), ("user", "And then?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = client.chat(messages=messages, max_tokens=12).json["choices"][0]["message"]["content"]
    assert page.run("return [...document.querySelectorAll('.painted')].map(p => p.textContent)") == [first, expected]
    page.one("#anew").click()
    assert page.shows("#welcome")
    page.ask("Hello")
    page.answered()
    assert page.text(".painted") == first


def test_a_character_of_several_tokens_is_painted_whole(browser: Browser, eagle: Any) -> None:
    client, question = eagle
    with running(client) as url:
        browser.open(url)
        browser.set("max-tokens", 4)
        browser.ask(question)
        browser.answered()
        painted = browser.run(
            "return [...document.querySelectorAll('.painted .tok')].map(t => [t.textContent, t.title])"
        )
        assert painted[0][0] == "🦅"
        assert painted[0][1].startswith("4 tokens: ")


def test_an_answer_can_be_stopped(browser: Browser, new_server: Any) -> None:
    with new_server() as client, running(client) as url:
        step = client.engine.step
        client.engine.step = lambda: (time.sleep(0.03), step())[1]
        browser.open(url)
        browser.set("max-tokens", 200)
        browser.ask("Hello")
        browser.wait("return document.querySelectorAll('.painted .tok').length > 3")
        assert not browser.shows("#send")
        browser.one("#stop").click()
        browser.answered()
        deadline = time.monotonic() + 5
        while client.application.context.admission.in_flight or client.engine.busy:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "stopped" in browser.text(".figures")
        client.all_back()


def test_both_sides_say_the_same(page: Browser) -> None:
    page.one("#tab-compare").click()
    assert "timing of each alone" in page.text("#order-hint")
    for temperature, order in ((0, "one"), (1, "both")):
        page.set("temperature", temperature)
        page.set("max-tokens", 30)
        page.run("document.querySelector(`input[value=${arguments[0]}]`).click()", order)
        page.one("#compare-run").click()
        page.wait("return !document.getElementById('compare-run').hidden")
        assert page.text("#verdict").startswith("✓ Same text"), page.text("#verdict")
        assert page.text("#plain-side .painted") == page.text("#drafted-side .painted") != ""
        assert page.run("return document.querySelector('#plain-side .tok:not(.d0)')") is None
        for side in ("plain", "drafted"):
            assert float(page.text(f"#{side}-side .figures dd")) > 0


def test_the_dashboard_shows_what_happens(page: Browser, client: Any) -> None:
    page.one("#tab-dashboard").click()
    page.wait("return document.querySelectorAll('#tiles dd').length > 0")
    fields = {"max_tokens": 60, "ignore_eos": True, "speculative": {"mode": "fixed", "depth": 3}}
    client.complete(**fields)
    counts = client.get("/status").json["counts"]
    told = f"{counts['tokens']:,}"
    page.wait(f"return [...document.querySelectorAll('#tiles dd')].some(d => d.textContent === '{told}')")
    figures = page.run(
        "return [...document.querySelectorAll('#plots figure')].map(f => f.querySelector('h3').textContent)"
    )
    assert set(figures) == {
        "Acceptance by depth", "Depth chosen", "Throughput", "Acceptance length", "Users", "KV cache",
    }  # fmt: skip
    assert page.run("return document.querySelectorAll('#plots figure .bar.c1').length") >= 4
    assert page.run("return document.querySelectorAll('#plots figure .line').length") >= 4
    page.run("document.querySelectorAll('#plots details').forEach(d => d.open = true)")
    share = counts["accepted_by_depth"][0] / counts["drafts"]
    page.wait("return document.querySelector('#plots tbody tr td:nth-child(3)')")
    first = page.text("#plots tbody tr td:nth-child(3)")
    assert first == f"{int(100 * share + 0.5)} %"
    assert "✓ quiet" in page.text("#alarm-list")
    labels = page.run("return [...document.querySelectorAll('#plots svg')].map(s => s.getAttribute('aria-label'))")
    assert all(labels)


def test_an_alarm_shows(browser: Browser, new_server: Any) -> None:
    with new_server() as client, running(client) as url:
        for _ in range(100):
            client.engine.controller.observe(StepReport(rounds=[RoundOutcome(key=0, drafted=3, accepted=0)]))
        browser.open(url + "#dashboard")
        browser.wait("return document.querySelector('#alarm-list .raised')")
        assert "collapsed" in browser.text("#alarm-list")
        assert "eyas check" in browser.text("#notice-list")
        assert "alarm" in browser.text("#state")


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: Browser, new_server: Any) -> None:
    with new_server(keys=("hush",)) as client, running(client) as url:
        browser.open(url)
        browser.wait("return document.getElementById('key-dialog').open")
        browser.one("#key").send_keys("wrong\n")
        browser.wait("return document.getElementById('key-wrong').textContent.includes('does not know')")
        browser.one("#key").clear()
        browser.one("#key").send_keys("hush\n")
        browser.wait("return document.getElementById('state').dataset.state === 'ok'")
        assert not browser.run("return document.getElementById('key-dialog').open")
        browser.set("max-tokens", 5)
        browser.ask("Hello")
        browser.answered()
        assert browser.text(".painted")
        assert "hush" in browser.run("return JSON.stringify(sessionStorage)")
        assert "hush" not in browser.run("return JSON.stringify(localStorage) + document.cookie + location.href")


def test_tabs_and_theme_work_by_keyboard(page: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    page.one("#tab-playground").send_keys(Keys.ARROW_LEFT)
    assert page.run("return document.activeElement.id") == "tab-dashboard"
    assert page.shows("#dashboard")
    assert not page.shows("#playground")
    page.one("#tab-dashboard").send_keys(Keys.HOME)
    assert page.shows("#playground")
    grounds = set()
    for _ in range(3):
        page.one("#theme").send_keys(Keys.ENTER)
        grounds.add((page.text("#theme"), page.run("return getComputedStyle(document.body).backgroundColor")))
    assert {name for name, _ in grounds} == {"Theme: light", "Theme: dark", "Theme: auto"}
    assert len({ground for _, ground in grounds}) == 2


def test_a_refusal_is_shown_in_the_servers_words(browser: Browser, client: Any) -> None:
    with running(client) as url:
        browser.open(url)
        browser.set("max-tokens", 256)
        browser.ask("Hello")
        browser.answered()
        assert "use 2" in browser.text(".answer .wrong")
        assert browser.text(".answer .wrong").startswith("No answer: max_tokens 256")
        browser.complaints()  # the browser itself notes every 400


def test_nothing_is_wider_than_a_phone(page: Browser) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 380, "height": 780, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        for view in ("playground", "compare", "dashboard"):
            page.run(f"document.getElementById('tab-{view}').click()")
            assert page.run("return document.documentElement.scrollWidth") <= 380, view
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

"""The page in a real browser: what its users see and do. `make browser` runs it where Chromium is installed."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from eyas.engine.speculation.step_report import RoundOutcome, StepReport
from eyas.engine.suffix.config import SuffixConfig
from eyas.serve.transport.server import Server, listen, url_of
from serve.conftest import OPTIONS, serve

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


# In the page: fetch that answers a chat with these deltas, one token each, and everything else as it was. It keeps the
# bodies of chats in `asked`.
STREAM = """
const fetched = window.fetch, asked = (window.asked = []);
const stream = (deltas) => async (address, options) => {
  if (!address.includes("chat/completions")) return fetched(address, options);
  asked.push(JSON.parse(options.body));
  const counts = {passes: 1, drafts: 0, drafted_tokens: 0, accepted_tokens: 0, acceptance_length: null};
  const end = (i) => (i + 1 < deltas.length ? null : "stop");
  const chunks = deltas.map((delta, i) => ({choices: [{index: 0, delta, finish_reason: end(i),
    speculative: {tokens: [i], texts: [delta.content ?? delta.reasoning], depths: [i % 8], ...counts}}]}));
  const events = [...chunks.map((chunk) => JSON.stringify(chunk)), "[DONE]"];
  return new Response(events.map((event) => `data: ${event}\n\n`).join(""));
};
"""


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

    def module(self, name: str, expression: str, *arguments: Any) -> Any:
        """Evaluate an expression with one of the page's modules as `m` and the arguments as `args`."""
        script = f"const done = arguments[arguments.length - 1], args = arguments; import('/page/{name}.js').then("
        return self.driver.execute_async_script(script + f"m => done({expression}), e => done(String(e)))", *arguments)

    def ask(self, message: str) -> None:
        self.one("#message").send_keys(message + "\n")

    def answered(self) -> None:
        self.wait("return !document.getElementById('send').hidden")

    def complaints(self) -> list[Any]:
        """The new messages of the console."""
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


def test_the_conversation_is_sent_back_and_can_be_cleared(page: Browser, client: Any) -> None:
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


def test_both_sides_have_equal_texts(page: Browser) -> None:
    page.one("#tab-compare").click()
    page.set("compare-prompt", "Hello")
    assert "median of each side's two runs" in page.text("#order-hint")
    for temperature, order in ((0, "one"), (1, "both")):
        page.set("temperature", temperature)
        page.set("max-tokens", 30)
        page.run("document.querySelector(`input[value=${arguments[0]}]`).click()", order)
        page.one("#compare-run").click()
        page.wait("return !document.getElementById('compare-run').hidden")
        assert page.text("#verdict").startswith("✓ Same text"), page.text("#verdict")
        assert page.text("#plain-side .painted") == page.text("#drafted-side .painted") != ""
        assert page.run("return document.querySelector('#plain-side .tok:not(.d0)')") is None
        words = page.text("#verdict")
        assert any(part in words for part in ("times as fast", "Speculation lost here", "No clear difference"))
        for side in ("plain", "drafted"):
            assert re.fullmatch(r"median [0-9.]+ tokens/s of [0-9.]+ and [0-9.]+", page.text(f"#{side}-median"))
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
        "Time to first token", "Time between tokens", "Refusals and errors",
    }  # fmt: skip
    assert page.run("return document.querySelectorAll('#plots figure .bar.c1').length") >= 4
    assert page.run("return document.querySelectorAll('#plots figure .line').length") >= 4
    page.run("document.querySelectorAll('#plots details').forEach(d => d.open = true)")
    share = counts["accepted_by_depth"][0] / counts["drafts"]
    page.wait("return document.querySelector('#plots tbody tr td:nth-child(3)')")
    first = page.text("#plots tbody tr td:nth-child(3)")
    assert first == f"{int(100 * share + 0.5)} %"
    for words in ("✓ Requests taken: yes", "✓ Engine healthy: yes", "✓ Drafter useful: yes"):
        assert words in page.text("#alarm-list")
    labels = page.run("return [...document.querySelectorAll('#plots svg')].map(s => s.getAttribute('aria-label'))")
    assert all(labels)


def test_alarms_are_shown(browser: Browser, new_server: Any) -> None:
    with new_server() as client, running(client) as url:
        for _ in range(100):
            client.engine.controller.observe(StepReport(rounds=[RoundOutcome(key=0, drafted=3, accepted=0)]))
        browser.open(url + "#dashboard")
        browser.wait("return document.querySelector('#alarm-list .raised')")
        assert "▲ Drafter useful: no" in browser.text("#alarm-list")
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


def test_a_refusal_is_shown_with_the_servers_message(browser: Browser, client: Any) -> None:
    with running(client) as url:
        browser.open(url)
        browser.set("max-tokens", 256)
        browser.ask("Hello")
        browser.answered()
        assert "use 2" in browser.text(".answer .wrong")
        assert browser.text(".answer .wrong").startswith("No answer: max_tokens 256")
        browser.complaints()  # the browser itself notes every 400


def test_nothing_is_wider_than_a_phone(page: Browser) -> None:
    page.run(
        STREAM + "window.fetch = stream([{content: arguments[0]}])",
        f"```\n{'long ' * 60}\n```\n\n|a|b|\n|-|-|\n|{'x' * 200}|1|",
    )
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 780, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        page.ask("Hello")
        page.answered()
        for shown in ("text", "painted"):
            page.run(f"document.querySelector('#answers-as input[value={shown}]').click()")
            assert page.run("return document.documentElement.scrollWidth") <= 390, shown
        for view in ("playground", "compare", "dashboard"):
            page.run(f"document.getElementById('tab-{view}').click()")
            assert page.run("return document.documentElement.scrollWidth") <= 390, view
            assert page.run("return document.querySelector('.top').offsetHeight") <= 0.25 * 780
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


MARKDOWN = {
    "plain *text* and **more**, `a*b*`": "<p>plain <em>text</em> and <strong>more</strong>, <code>a*b*</code></p>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "[a](javascript:alert(1)) [b](https://b.example/c)": '<p>[a](javascript:alert(1)) <a href="https://b.example/c" target="_blank" rel="noopener noreferrer">b</a></p>',  # noqa: E501
    "# One\n### Two": "<h4>One</h4><h6>Two</h6>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "- a\n- b\n  - c\n\n1. d\n2. e": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol><li>d</li><li>e</li></ol>",
    "3. a\n\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> a\n> b": "<blockquote><p>a<br>b</p></blockquote>",
    "2 * 3 * 4, snake_case_name, \\*no\\*": "<p>2 * 3 * 4, snake_case_name, *no*</p>",
    "---": "<hr>",
    "text\n- item": "<p>text</p><ul><li>item</li></ul>",
    "***both*** ~~gone~~": "<p><strong><em>both</em></strong> <del>gone</del></p>",
}


def test_markdown_becomes_nodes_and_never_markup(page: Browser) -> None:
    show = (
        "(() => { const d = document.createElement('div'); d.append(...m.markdown(args[0])); return d.innerHTML; })()"
    )
    for text, expected in MARKDOWN.items():
        assert page.module("markdown", show, text) == expected, text
    fenced = page.module("markdown", show, "```python\nif a < b:\n    *x*\n```\nafter")
    assert '<pre tabindex="0"><code>if a &lt; b:\n    *x*</code></pre>' in fenced
    assert "<span>python</span>" in fenced
    assert fenced.endswith("<p>after</p>")
    assert "<code>half" in page.module("markdown", show, "~~~\nhalf")  # while an answer still comes
    table = page.module("markdown", show, "|a|b|\n|---|:-:|\n|1|`2`|")
    assert "<thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><code>2</code></td></tr>" in table
    for nasty in (">" * 3000, "- " * 3000, "*" * 9999, "`" * 9999, "[" * 9999, "_a" * 9999, "|" * 999 + "\n|-|-|"):
        assert isinstance(page.module("markdown", show, nasty), str)


def test_an_answer_is_prose_with_its_reasoning_folded_and_can_be_painted(page: Browser) -> None:
    deltas = [{"reasoning": "Let me see."}, {"content": "**Yes**:\n"}, {"content": "\n```\ncode\n```"}]
    page.run(STREAM + "window.fetch = stream(arguments[0])", deltas)
    page.ask("Hello")
    page.answered()
    assert page.text(".prose strong") == "Yes"
    assert "monospace" in page.run("return getComputedStyle(document.querySelector('.prose pre code')).fontFamily")
    assert page.text(".reasoning .thoughts") == "Let me see."
    assert not page.run("return document.querySelector('.reasoning').open")
    assert not page.shows(".conversation .painted")
    page.run("document.querySelector('#answers-as input[value=painted]').click()")
    assert page.shows(".conversation .painted")
    assert not page.shows(".prose")
    page.driver.refresh()
    page.wait("return document.getElementById('state').dataset.state === 'ok'")
    assert page.shows(".conversation .painted")
    assert page.text(".prose strong") == "Yes"


def test_conversations_survive_a_reload_and_can_be_forgotten(page: Browser) -> None:
    page.set("max-tokens", 12)
    page.ask("Hello")
    page.answered()
    first = page.text(".painted")
    page.driver.refresh()
    page.wait("return document.getElementById('state').dataset.state === 'ok'")
    assert page.text(".painted") == first
    assert page.text(".question .body") == "Hello"
    assert len(page.run("return [...document.querySelectorAll('.tokens tbody tr')]")) == 12
    page.one("#anew").click()
    page.set("max-tokens", 12)
    page.ask("Another")
    page.answered()
    assert page.run("return [...document.querySelectorAll('.kept-title')].map(t => t.textContent)") == [
        "Another",
        "Hello",
    ]
    page.run("document.querySelectorAll('.kept-title')[1].click()")
    assert page.text(".painted") == first
    assert "this browser alone" in page.text("#kept")
    page.run("document.getElementById('forget').click()")
    assert page.shows("#welcome")
    assert page.run("return localStorage.getItem('eyas-conversations')") is None
    page.run('localStorage.setItem(\'eyas-conversations\', \'[{"id": 3}, {"id": "a", "turns": [{}]}]\')')
    page.driver.refresh()
    page.wait("return document.getElementById('state').dataset.state === 'ok'")
    assert page.shows("#welcome")


def test_what_is_kept_is_bounded(page: Browser) -> None:
    kept = page.module(
        "store",
        "(() => { const turn = (n) => ({question: 'q', answer: {text: 'x'.repeat(n), tokens: [], passes: []}});"
        "for (let i = 0; i < 30; i += 1) m.keep({id: `c${i}`, turns: [turn(200_000)]});"
        "const many = m.kept().length; m.keep({id: 'big', turns: [turn(100)]});"
        "return [many, m.kept()[0].id, localStorage.getItem('eyas-conversations').length]; })()",
    )
    many, first, size = kept
    assert 5 <= many <= 20
    assert first == "big"
    assert size <= 2_000_000


def test_a_question_can_be_edited_and_an_answer_regenerated(page: Browser) -> None:
    page.run(STREAM + "window.fetch = stream([{content: 'yes'}])")
    for question in ("one", "two"):
        page.ask(question)
        page.answered()
    page.run("document.querySelectorAll('.again')[1].click()")
    page.answered()
    asked = page.run("return window.asked")
    assert asked[2]["messages"] == asked[1]["messages"]
    assert len(asked[2]["messages"]) == 3
    page.run("[...document.querySelectorAll('.question .small')].find(b => b.textContent === 'Edit').click()")
    assert page.run("return document.getElementById('message').value") == "one"
    assert page.shows("#editing")
    page.one("#edit-cancel").click()
    assert page.run("return document.querySelectorAll('.question').length") == 2
    page.run("[...document.querySelectorAll('.question .small')].find(b => b.textContent === 'Edit').click()")
    page.ask(" more")
    page.answered()
    assert page.run("return window.asked.at(-1).messages") == [{"role": "user", "content": "one more"}]
    assert page.run("return [...document.querySelectorAll('.question .body')].map(b => b.textContent)") == ["one more"]


def test_settings_become_fields_and_the_same_request_as_code(page: Browser, client: Any, tmp_path: Path) -> None:
    page.run(STREAM + "window.fetch = stream([{content: 'yes'}])")
    schema = {"type": "object", "properties": {"it's": {"type": "null"}}}
    values = {"top-p": 0.5, "seed": 7, "stop-texts": "END\nStop it", "max-tokens": 9, "temperature": 1}
    for field, value in (values | {"schema": "{not"}).items():
        page.set(field, value)
    page.ask("it's")
    assert page.run("return window.asked.length") == 0
    assert "Not JSON" in page.run("return document.getElementById('schema').validationMessage")
    page.set("schema", json.dumps(schema))
    page.run("document.getElementById('composer').requestSubmit()")
    page.answered()
    page.wait("return window.asked.length")
    body = page.run("return window.asked[0]")
    fields = {"temperature": 1, "top_p": 0.5, "max_tokens": 9, "seed": 7, "stop": ["END", "Stop it"]}
    assert {name: body[name] for name in fields} == fields
    assert body["response_format"]["json_schema"]["schema"] == schema
    page.set("schema", "")
    page.run("document.getElementById('open-code').click()")
    curl = page.text("#code-text")
    assert "$EYAS_API_KEY" in curl
    if shutil.which("curl"):
        told = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True).stdout
        assert json.loads(told)["usage"]["completion_tokens"] <= 9, told
    page.run("document.querySelector('input[value=python]').click()")
    (call,) = [
        node for node in ast.walk(ast.parse(page.text("#code-text")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "client.chat.completions.create"
    ]  # fmt: skip
    told = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    assert {name: told[name] for name in fields} == fields
    assert told["messages"] == [{"role": "user", "content": "it's"}]
    assert told["extra_body"] == {"speculative": {"mode": "auto"}}
    page.one("#code-close").click()


def test_a_conversation_can_be_exported(page: Browser, tmp_path: Path) -> None:
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.set("max-tokens", 5)
    page.ask("Hello")
    page.answered()
    for ending in ("json", "markdown"):
        page.run(f"document.getElementById('export-{ending}').click()")
    deadline = time.monotonic() + 10
    while len(list(tmp_path.glob("conversation*.[jm]*"))) < 2 or list(tmp_path.glob("*.crdownload")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (turn,) = json.loads((tmp_path / "conversation.json").read_text())["turns"]
    assert turn["question"] == "Hello"
    assert turn["answer"]["text"] == page.text(".painted")
    assert f"## Answer\n\n{turn['answer']['text']}\n" in (tmp_path / "conversation.md").read_text()


def test_badges_show_the_state(browser: Browser, new_server: Any) -> None:
    with new_server() as client, running(client) as url:
        step = client.engine.step
        client.engine.step = lambda: (time.sleep(0.03), step())[1]
        browser.open(url)
        browser.set("max-tokens", 100)
        browser.ask("Hello")
        browser.wait("return document.getElementById('state').textContent === '1 running'")
        assert browser.text(".badge") == "running"
        browser.one("#stop").click()
        browser.answered()
        assert browser.text(".badge") == "stopped"
        browser.wait("return document.getElementById('state').textContent === 'ready'")
        browser.run("window.fetch = () => Promise.reject(new TypeError('gone'))")
        browser.ask("Hello")
        browser.answered()
        assert (
            browser.run("return [...document.querySelectorAll('.conversation .badge')].at(-1).textContent")
            == "disconnected"
        )
        browser.wait("return document.getElementById('state').textContent === 'disconnected'")
    browser.complaints()


def test_the_focus_is_in_the_message_box_and_all_works_by_keyboard(page: Browser) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> None:
        ActionChains(page.driver).send_keys(*keys).perform()

    def focused() -> str:
        return str(page.run("const a = document.activeElement; return a.id || a.textContent || a.value"))

    page.set("max-tokens", 5)
    page.wait("return document.activeElement.id === 'message'")
    assert page.run("return window.scrollY") == 0
    press("Hello", Keys.ENTER)
    page.answered()
    assert focused() == "message"
    seen = []
    for _ in range(8):
        ActionChains(page.driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
        seen.append(focused())
    assert {"Regenerate", "Copy", "Edit"} <= set(seen)
    page.run("document.getElementById('message').focus()")
    press(Keys.TAB, Keys.ARROW_RIGHT)
    assert page.shows(".conversation .painted")
    page.run("document.getElementById('open-code').focus()")
    press(Keys.ENTER)
    assert page.shows("#code-dialog")
    press(Keys.ESCAPE)
    assert not page.run("return document.getElementById('code-dialog').open")


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_depths_are_told_apart_and_read_in_both_themes(page: Browser) -> None:
    for theme in ("light", "dark"):
        page.run("document.documentElement.dataset.theme = arguments[0]", theme)
        colours = page.run(
            "return [...document.querySelectorAll('#scale .tok')].map(t => getComputedStyle(t))"
            ".map(s => [s.backgroundColor, s.color])"
        )
        assert len(colours) == 7
        card = page.run("return getComputedStyle(document.getElementById('settings')).backgroundColor")
        grounds = [card, *(ground for ground, _ in colours)]
        for before, after in pairwise(grounds):
            assert contrast(before, after) >= 1.15, (theme, before, after)
        for ground, ink in colours:
            assert contrast(ground, ink) >= 4.5, (theme, ground, ink)


def test_a_verdict_claims_what_the_runs_showed(page: Browser) -> None:
    judge = "m.judge(args[0], args[1])"
    assert page.module("verdict", judge, [10, 12], [20, 24])["words"].startswith("With speculation 2.00 times as fast")
    assert page.module("verdict", judge, [20, 24], [10, 12])["words"].startswith("Speculation lost here: 2.00 times")
    assert page.module("verdict", judge, [10, 14], [13, 18])["words"].startswith("No clear difference")
    assert page.module("verdict", judge, [10, 10], [10.1, 10.1])["words"].startswith("No clear difference")
    assert page.module("verdict", judge, [None, 1], [1, 1])["ratio"] is None


def test_quantiles_come_from_buckets(page: Browser) -> None:
    histogram = {"upper_seconds": [0.01, 0.1], "counts": [10, 10, 0]}
    for share, expected in ((0.25, 5), (0.5, 10), (0.75, 55), (1, 100)):
        assert page.module("flow", "m.quantile(args[0], args[1])", histogram, share) == pytest.approx(expected)
    assert page.module("flow", "m.quantile(args[0], 0.5)", histogram | {"counts": [0, 0, 3]}) == 100
    assert page.module("flow", "m.quantile(args[0], 0.5)", histogram | {"counts": [0, 0, 0]}) is None


def test_a_dashboard_that_is_opened_late_shows_the_hour(browser: Browser, new_server: Any) -> None:
    with new_server() as client:
        client.complete(max_tokens=20)
        context, history = client.application.context, client.application.history
        object.__setattr__(context, "started", context.started - 3600)
        asyncio.run(history.sample())
        (now,) = client.get("/status/history").json["samples"]
        for at in range(0, 3500, 10):
            history._samples.append(json.dumps(now | {"at_seconds": at}))
        history._samples.popleft()
        client.complete(max_tokens=0)
        with running(client) as url:
            browser.open(url + "#dashboard")
            browser.run(
                "const s = document.getElementById('span'); s.value = 3600; s.dispatchEvent(new Event('change'))"
            )
            browser.run("document.querySelectorAll('#plots details').forEach(d => d.open = true)")
            browser.wait("return document.querySelectorAll('#plots figure:nth-child(3) tbody tr').length > 100")
            label = browser.run(
                "return document.querySelector('#plots figure:nth-child(3) svg').getAttribute('aria-label')"
            )
            assert "last 60 minutes" in label
            tiles = dict(browser.run("return [...document.querySelectorAll('#tiles > div')].map(d => [...d.children].slice(0, 2).map(c => c.textContent))"))  # fmt: skip  # noqa: E501
            assert tiles["Errors"] == "1"
            assert tiles["To first token"].endswith("s")


def test_the_plot_of_acceptance_marks_when_another_drafter_came_to_work(browser: Browser, new_server: Any) -> None:
    with new_server() as client:
        context, history = client.application.context, client.application.history
        object.__setattr__(context, "started", context.started - 600)
        asyncio.run(history.sample())
        client.complete(max_tokens=20, speculative={"mode": "fixed", "depth": 3})
        context.drafter_changes.note("tiny-learnt-0001")
        context.drafter_changes.note("tiny", "rollback")
        with running(client) as url:
            browser.open(url + "#dashboard")
            browser.wait("return document.querySelectorAll('#plots figure .mark').length === 2")
            titles = browser.run("return [...document.querySelectorAll('#plots .mark title')].map(t => t.textContent)")
            assert titles == ["now tiny-learnt-0001", "back to tiny"]
            place = "[...document.querySelectorAll('#plots figure')].find(f => f.querySelector('.mark'))"
            assert browser.run(f"return {place}.querySelector('h3').textContent") == "Acceptance length"
            assert "now tiny-learnt-0001" in browser.run(f"return {place}.querySelector('svg').ariaLabel")
            listed = browser.run(f"return [...{place}.querySelectorAll('.marks li')].map(l => l.textContent)")
            assert [words.split(",")[0] for words in listed] == titles
            browser.run(f"{place}.querySelector('details').open = true")
            browser.wait(f"return {place}.querySelector('tbody').textContent.includes('back to tiny')")
            assert browser.run(f"return [...{place}.querySelectorAll('th')].at(-1).textContent") == "drafter"


def test_both_sides_are_compared_where_there_are_suffix_drafts_alone(browser: Browser, target: Any) -> None:
    options = replace(OPTIONS, suffix=SuffixConfig(max_spec_factor=4.0))
    with serve(target, None, options=options) as client, running(client) as url:
        browser.open(url + "#compare")
        browser.wait("return !document.getElementById('compare-run').disabled")
        assert browser.run("return document.querySelector('#speculation option[value=fixed]').disabled")
        browser.set("compare-prompt", "abcdefgabcdefgabcdefg")
        browser.set("max-tokens", 30)
        browser.one("#compare-run").click()
        browser.wait("return !document.getElementById('compare-run').hidden")
        assert browser.text("#verdict").startswith("✓ Same text"), browser.text("#verdict")
    with serve(target, None) as client, running(client) as url:
        browser.open(url + "#compare")
        browser.wait("return document.getElementById('compare-run').disabled")
        assert "Nobody drafts on this server" in browser.text("#verdict")

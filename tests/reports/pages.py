"""Checks of every report page: complete, self-contained, running nothing but its own script."""

import re
from base64 import b64encode
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser

VOID = ("meta", "br", "line", "path", "polyline", "polygon", "rect")


class _Page(HTMLParser):
    """Everything a page would fetch, every handler and inline style, and tags left open."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "data", "poster", "style") or name.startswith("on"):
                self.outside.append(f"{tag} {name}")
            if name == "href" and not (value or "").startswith("#"):
                self.outside.append(f"{tag} {value}")
        if tag in ("link", "iframe", "img", "object", "form"):
            self.outside.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def assert_sound(page: str) -> None:
    """Hold a page against all of it."""
    read = _Page()
    read.feed(page)
    assert read.outside == [], "the page needs nothing from elsewhere, and its policy would refuse the rest"
    assert read.open == []
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert page.count("<script") == 1, "what users and servers say is escaped"
    parts = dict(part.strip().split(" ", 1) for part in unescape(policy).split(";"))
    own = {"style-src": _hash(style), "script-src": _hash(script)}
    assert parts == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'", **own}
    places = re.findall(r' id="([^"]+)"', page)
    assert len(places) == len(set(places))
    assert page.index('class="lead') < page.index("<h1>") < page.index("<nav")
    contents, copied = re.findall(r'href="#([^"]+)"', page), re.findall(r'data-copy="([^"]+)"', page)
    assert len(contents) >= 5
    assert copied
    assert set(contents + copied) <= set(places)
    assert all(f'<button type="button" data-copy="{place}" hidden>' in page for place in copied), "no script, no button"
    charts = page.count('<svg class="chart"')
    assert len(re.findall(r'<text class="name"', page)) >= 2 * charts, "both axes of every chart have a title"


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"

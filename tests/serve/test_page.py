"""The page as a browser gets it: every file, its headers, and nothing that reaches elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import eyas.serve
from each import each
from eyas.serve.page_files import TYPES

FOLDER = Path(eyas.serve.__file__).parent / "page"
FILES = sorted(FOLDER.iterdir())
ADDRESSES = {"index.html": "/"} | {file.name: f"/page/{file.name}" for file in FILES if file.name != "index.html"}
NAMESPACE = "http://www.w3.org/2000/svg"


class Markup(HTMLParser):
    """Tags with their attributes, in order, and fields that are written within their label."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.within_label: list[dict[str, str | None]] = []
        self._label_open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._label_open = self._label_open or tag == "label"
        if self._label_open and tag == "input":
            self.within_label.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        self._label_open = self._label_open and tag != "label"

    def values(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.tags if name in attributes]


@pytest.fixture(scope="module")
def markup() -> Markup:
    return Markup((FOLDER / "index.html").read_text(encoding="utf-8"))


@each("name", sorted(ADDRESSES))
def test_every_file_has_its_type_and_a_strict_policy(client: Any, name: str) -> None:
    reply = client.get(ADDRESSES[name])
    assert reply.status == 200
    assert reply.text == (FOLDER / name).read_text(encoding="utf-8")
    assert reply.headers["content-type"] == TYPES[name.rpartition(".")[2]]
    policy = [part.strip() for part in reply.headers["content-security-policy"].split(";")]
    assert {"default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} <= set(policy)
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"


def test_a_file_that_is_known_is_not_sent_again(client: Any) -> None:
    for address in ADDRESSES.values():
        first = client.get(address)
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = client.get(address, headers={"if-none-match": known})
            assert (again.status, again.text) == (304, "")
            assert again.headers["etag"] == tag
        assert client.get(address, headers={"if-none-match": '"other"'}).status == 200


def test_no_path_leads_out_of_the_page(client: Any) -> None:
    for path in ("/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/page/none.js"):
        client.get(path).assert_refused(404)
    client.post("/", {}).assert_refused(405)


def test_the_page_can_be_left_out(new_server: Any) -> None:
    with new_server(page=False) as client:
        for path in ("/", "/page/app.js"):
            client.get(path).assert_refused(404)
        assert client.get("/status").status == 200


def test_the_page_is_open_and_its_data_needs_the_key(new_server: Any) -> None:
    with new_server(keys=("secret",)) as client:
        assert client.get("/").status == 200
        assert client.get("/page/app.js").status == 200
        client.get("/status").assert_refused(401, "Authorization: Bearer")
        assert client.get("/status", headers={"authorization": "Bearer secret"}).status == 200


@each("file", FILES)
def test_no_file_names_another_host(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace(NAMESPACE, "")
    assert not re.findall(r"[a-z]+://|[\"'(]//|@import|data:\S", text)


def test_nothing_is_inline(markup: Markup) -> None:
    for tag, attributes in markup.tags:
        assert tag != "style"
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "script" or attributes.get("src")


def test_every_reference_leads_to_a_file(markup: Markup) -> None:
    ids = set(markup.values("id"))
    for link in markup.values("href") + markup.values("src"):
        assert link.removeprefix("page/") in ADDRESSES or link.removeprefix("#") in ids, link
    for file in FOLDER.glob("*.js"):
        for module in re.findall(r"from \"([^\"]+)\"", file.read_text(encoding="utf-8")):
            assert module.removeprefix("./") in ADDRESSES, (file.name, module)


def test_every_id_is_unique_and_every_name_of_one_is_known(markup: Markup) -> None:
    ids = markup.values("id")
    assert len(ids) == len(set(ids))
    for name in ("for", "aria-labelledby", "aria-controls", "aria-describedby"):
        assert set(markup.values(name)) <= set(ids), name
    for file in FOLDER.glob("*.js"):
        assert set(re.findall(r"byId\(\"([^\"]+)\"\)", file.read_text(encoding="utf-8"))) <= set(ids), file.name


def test_every_field_has_a_label(markup: Markup) -> None:
    fields = [attributes for tag, attributes in markup.tags if tag in ("input", "select", "textarea")]
    assert len(fields) >= 8
    for attributes in fields:
        assert attributes.get("id") in markup.values("for") or attributes in markup.within_label, attributes


@pytest.mark.slow
def test_the_wheel_holds_the_page(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)],
        cwd=root,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if name.startswith("eyas/serve/page/")}
    assert packed == {f"eyas/serve/page/{file.name}": file.read_bytes() for file in FILES}

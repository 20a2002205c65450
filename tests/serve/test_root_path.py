"""Under a path of a proxy's: everything works with the prefix and without it."""

from typing import Any

import pytest

from each import each
from eyas.errors import UserError
from eyas.serve.transport.root_path import read_root_path


@each(("text", "path"), [("", ""), ("/", ""), ("/eyas", "/eyas"), ("eyas/", "/eyas"), ("/a/b.c/", "/a/b.c")])
def test_slashes_do_not_matter(text: str, path: str) -> None:
    assert read_root_path(text) == path


@each("text", ["/a b", "/a//b", "/../a", "/a?b", "https://host/a", "/{name}"])
def test_invalid_root_paths_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--root-path"):
        read_root_path(text)


def test_a_proxy_may_leave_the_prefix_or_take_it_off(new_server: Any) -> None:
    with new_server(root_path="/eyas", keys=("key",)) as client:
        for prefix in ("", "/eyas"):
            assert client.get(f"{prefix}/health").json == {"status": "ok"}
            assert client.get(f"{prefix}/openapi.json").json["servers"] == [{"url": "/eyas"}]
            page = client.get(f"{prefix}/")
            assert "<title>eyas</title>" in page.text
            assert 'src="/' not in page.text
            assert 'href="/' not in page.text  # relative, so they stay under the prefix
            assert client.get(f"{prefix}/page/app.js").status == 200
            client.get(f"{prefix}/v1/models").assert_refused(401)  # keys are asked for under both
            keyed = {"authorization": "Bearer key"}
            assert client.get(f"{prefix}/v1/models", headers=keyed).json["data"][0]["id"] == "tiny"
        moved = client.get("/eyas")
        assert (moved.status, moved.headers["location"]) == (308, "/eyas/")
        assert client.get("/eyasx/health", headers=keyed).status == 404
        assert client.get("/eyas/eyas/health", headers=keyed).status == 404


def test_the_pages_scripts_ask_relative_addresses() -> None:
    from importlib.resources import files

    for item in files("eyas.serve").joinpath("page").iterdir():
        if item.name.endswith(".js"):
            assert 'fetch("/' not in item.read_text(), item.name


def test_without_a_root_path_openapi_lists_no_servers(client: Any) -> None:
    assert "servers" not in client.get("/openapi.json").json
    assert client.get("/eyas/health").status == 404

"""The check of the hub: a quick answer whether the hub has the model, is unreachable or refuses."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from eyas import hub
from eyas.errors import UserError
from eyas.hub import hub_options


class FakeHub(BaseHTTPRequestHandler):
    """Answers HEAD as the hub would."""

    answer: tuple[int, dict[str, str]] = (200, {})
    paths: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self.paths.append(self.path)
        self.send_response(self.answer[0])
        for name, value in self.answer[1].items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def be_the_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_seen", set())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Returns a function that sets the hub's answer and returns the requested paths."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    be_the_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")

    def answer(status: int, **headers: str) -> list[str]:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        FakeHub.answer, FakeHub.paths = (status, fields), []
        return FakeHub.paths

    yield answer
    server.shutdown()
    server.server_close()


def test_a_model_that_is_there_is_asked_for_once(answering: Any) -> None:
    paths = answering(302, Location="https://elsewhere.invalid/file")
    assert hub_options("org/name") == {}
    assert hub_options("org/name") == {}
    assert hub_options("org/name", revision="v1") == {"revision": "v1"}
    assert paths == ["/org/name/resolve/main/config.json", "/org/name/resolve/v1/config.json"]


@pytest.mark.parametrize(
    ("status", "code", "part"),
    [
        (404, "RepoNotFound", "the hub has no model 'org/name'"),
        (401, "RepoNotFound", "HF_TOKEN"),
        (404, "RevisionNotFound", "no revision 'v1'"),
        (403, "GatedRepo", "accepted its terms"),
        (404, "EntryNotFound", "no config.json"),
    ],
)
def test_refusals_of_the_hub_are_explained(answering: Any, status: int, code: str, part: str) -> None:
    answering(status, X_Error_Code=code, X_Error_Message="no")
    with pytest.raises(UserError, match=part):
        hub_options("org/name", revision="v1")


def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))


def test_without_a_network_the_local_cache_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        be_the_hub(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(UserError, match=r"no folder 'org/name'.*the hub cannot be asked.*refused"):
            hub_options("org/name")
        cached(monkeypatch, tmp_path)
        assert hub_options("org/name") == {"local_files_only": True}
    assert "using what the local cache has" in caplog.text


def test_a_server_error_is_no_missing_model(answering: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answering(503)
    with pytest.raises(UserError, match="the hub answers 503"):
        hub_options("org/name")
    cached(monkeypatch, tmp_path)
    assert hub_options("org/name") == {"local_files_only": True}


def test_a_silent_hub_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        be_the_hub(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        begun = time.monotonic()
        with pytest.raises(UserError, match="the hub cannot be asked"):
            hub_options("org/name")
        assert time.monotonic() - begun < 2.0


def test_offline_mode_sends_no_request(answering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = answering(200)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        hub_options("org/name")
    assert paths == []

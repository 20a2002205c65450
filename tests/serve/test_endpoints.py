"""Small endpoints that clients of vLLM probe, and those of OpenAI that are refused by name."""

from __future__ import annotations

from typing import Any

from each import each
from eyas import __version__
from eyas.serve.endpoints.refused import REFUSED_ENDPOINTS


def test_version_ping_and_load(new_server: Any) -> None:
    with new_server(keys=("secret",)) as client:  # probes carry no key
        assert client.get("/version").json == {"version": __version__}
        assert client.get("/load").json == {"server_load": 0}
        assert client.get("/ping").json == client.post("/ping").json == {"status": "ok"}
        client.application.context.admission.drain()
        assert client.get("/ping").status == 503


@each("path", REFUSED_ENDPOINTS)
def test_endpoints_that_are_not_served_are_refused_by_name(client: Any, path: str) -> None:
    path = path.replace("{name}", "some").replace("{action}", "thing")
    for method in (client.get, client.post):
        reply = method(path)
        reply.assert_refused(404, f"{path} is not served: ", "; ")
        assert reply.json["error"]["code"] == "unsupported_endpoint"


def test_refusals_say_what_to_use_instead(client: Any) -> None:
    client.post("/v1/embeddings", {"input": "a"}).assert_refused(404, "embedding model", "vLLM")
    client.get("/v1/responses/resp_1").assert_refused(404, "nothing is stored")


def test_refusals_need_the_key_where_the_endpoint_would(new_server: Any) -> None:
    with new_server(keys=("secret",)) as client:
        client.post("/v1/embeddings", {"input": "a"}).assert_refused(401, "key")

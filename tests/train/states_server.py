"""Server in this process that hands out states of a tiny target as vLLM with eyas's connector does.

It has the same protocol: three addresses, and files that appear whole. Faults can be injected.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from eyas.target.model import Target

Fault = Callable[[list[int]], str | None]
"""Fault of a document: `status NNN`, `no file`, `other ids`, `torn`, `error`; None: none."""

_ONE_AT_A_TIME = threading.Lock()
"""Lock around passes: servers share a target, and its capture hooks see every pass."""


class StatesServer:
    """HTTP server that keeps its port when it is stopped and started again."""

    def __init__(self, target: Target, folder: Path, layer_ids: tuple[int, ...], *, version: str = "0.32.0") -> None:
        self.target, self.folder, self.version = target, folder, version
        self.layer_ids = tuple(sorted({*layer_ids, target.facts.num_hidden_layers}))
        self.fault: Fault = lambda ids: None
        self.max_model_len = 4096
        self.asked: list[list[int]] = []
        self.most_bytes = 0
        self.keys: set[str | None] = set()
        self.pause = 0.0
        self._port = 0
        self._http: ThreadingHTTPServer | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> "StatesServer":
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/version":
                    self.answer(200, {"version": server.version})
                else:
                    self.answer(200, {"data": [{"id": "tiny", "max_model_len": server.max_model_len}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.keys.add(self.headers.get("Authorization"))
                self.answer(*server.complete(body))

            def answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        class Http(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *_: object) -> None:
                pass

            def __init__(self, *arguments: Any) -> None:
                self.open: set[Any] = set()
                super().__init__(*arguments)

            def process_request(self, request: Any, client_address: Any) -> None:
                self.open.add(request)
                super().process_request(request, client_address)

        self._http = Http(("127.0.0.1", self._port), Handler)
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop as if killed: connections break too."""
        assert self._http is not None
        http, self._http = self._http, None
        http.shutdown()
        http.server_close()
        for request in http.open:  # type: ignore[attr-defined]
            try:
                request.shutdown(2)
            except OSError:
                continue
        with _ONE_AT_A_TIME:
            pass  # a running pass must not outlive the test, since the model is shared

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        ids, name = body["prompt"], (body.get("kv_transfer_params") or {}).get("eyas_file")
        self.asked.append(ids)
        if self.pause:
            threading.Event().wait(self.pause)
        fault = self.fault(ids) or ""
        if fault.startswith("status"):
            return int(fault.split()[1]), {"error": {"message": "so it was asked"}}
        with _ONE_AT_A_TIME:
            if self._http is None:
                raise ConnectionAbortedError("stopped")
            output = self.target.forward(torch.tensor([ids]), self.layer_ids)
        states = output.aux_hidden_BTX[0].view(len(ids), len(self.layer_ids), -1)
        if fault == "error":
            (self.folder / f"{name}.error").write_text("OSError: no room")
        elif fault != "no file" and name is not None:
            said = ids[::-1] if fault == "other ids" else ids
            tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(said)}
            data = save(tensors, metadata={"layer_ids": json.dumps(list(self.layer_ids))})
            part = self.folder / f"{name}.part"
            part.write_bytes(data[: len(data) // 2] if fault == "torn" else data)
            part.rename(self.folder / f"{name}.safetensors")
            self.most_bytes = max(self.most_bytes, sum(_size(path) for path in self.folder.iterdir()))
        choice: dict[str, Any] = {"text": ""}
        if body.get("logprobs"):
            best = output.logits_BTV[0, -1].float().log_softmax(-1).topk(body["logprobs"])
            said_of = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            choice["logprobs"] = {"top_logprobs": [{f"token_id:{token}": value for token, value in said_of}]}
        return 200, {"choices": [choice], "kv_transfer_params": None if name is None else {"eyas_file": name}}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

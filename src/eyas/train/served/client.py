"""One vLLM server that hands out states: what is asked of it over HTTP, and whether it is well.

A fault is the document's or the server's. To tell, a server is asked for a few tokens that every server can do, and
what comes is held against the target's own head: if that works, it was the document's. The same question tells at the
start whether this is the right target at all.

Shapes: T tokens, A captured layers, D hidden size, V vocabulary.
"""

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from eyas.errors import UserError
from eyas.target.parts import TargetParts
from eyas.train.served.command import require_series
from eyas.train.served.state_files import BadFileError, StateFiles

REQUEST_SECONDS = 600.0
"""For one document; servers queue."""
PROBE_SECONDS = 60.0
PROBE_TOKENS = 16
MAX_PROBE_ERROR = 0.1
"""Sum over a few tokens of how far probabilities may differ: rounding to bfloat16 gives hundredths, a wrong head 1."""


class ServerAwayError(Exception):
    """The server cannot be reached or is not well; it may come back."""


class DocumentFailedError(Exception):
    """A server that answers did not give this document."""


def _headers() -> dict[str, str]:
    """With the key that vLLM reads from the same variable, if it is set."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


class StatesClient:
    """Asks one server; threads may share it."""

    def __init__(
        self,
        url: str,
        target: TargetParts,
        files: StateFiles,
        *,
        longest: int,
        seconds: float = REQUEST_SECONDS,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.url = url.rstrip("/")
        self._target, self._files, self._longest = target, files, longest
        self._seconds, self._given_up = seconds, given_up
        parts = urlsplit(self.url)
        self._host, self._path, self._tls = parts.netloc, parts.path, parts.scheme == "https"
        self._local = threading.local()
        self._model: str | None = None
        self.closed = False
        self._guard, self._open = threading.Lock(), set[http.client.HTTPConnection]()

    def close(self) -> None:
        """Break off whatever is under way, in all threads; nothing is asked any more."""
        with self._guard:
            self.closed = True
            connections = list(self._open)
        for connection in connections:
            if (sock := connection.sock) is not None:
                with suppress(OSError):  # the server may have closed it
                    sock.shutdown(socket.SHUT_RDWR)

    def connect(self) -> None:
        """Ask who it is and for a few states; `ServerAwayError` if it is not there, refused if it is the wrong one."""
        try:
            version, served = self._get("/version")["version"], self._get("/v1/models")["data"][0]
            name, room = str(served["id"]), served.get("max_model_len")
        except (LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{self.url} does not answer as vLLM does; correct features.servers") from error
        require_series(str(version), self.url)
        if isinstance(room, int) and room <= self._longest:
            raise UserError(
                f"{self.url} takes {room} tokens, one of them generated, and the longest document has {self._longest}; "
                f"start it with --max-model-len {self._longest + 1}, or lower data.max_length"
            )
        self._model = name
        try:
            self.probe()
        except DocumentFailedError as error:
            raise UserError(
                f"{self.url} does not hand out the states of {self._target.facts.source}: {error}"
            ) from error

    @torch.no_grad()
    def probe(self) -> None:
        """Fetch a few tokens and hold the target's head against what the server says comes next."""
        ids = [(3 + 7 * i) % self._target.facts.vocab_size for i in range(PROBE_TOKENS)]
        states_TAD, answer = self._ask(ids, seconds=PROBE_SECONDS, logprobs=8, return_tokens_as_token_ids=True)
        try:
            said = answer["choices"][0]["logprobs"]["top_logprobs"][0]
            theirs = {int(token.removeprefix("token_id:")): float(value) for token, value in said.items()}
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise DocumentFailedError(f"it gives no logprobs of token ids ({error})") from error
        norm, head = self._target.norm, self._target.head
        assert norm is not None
        state_D = norm(states_TAD[-1, -1].to(self._target.device, self._target.dtype)[None])
        p_V = head.scores(state_D)[0].float().softmax(dim=-1).cpu()
        found = torch.tensor(list(theirs.values())).exp()
        difference = float((p_V[list(theirs)] - found).abs().sum())
        if not difference <= MAX_PROBE_ERROR:
            raise DocumentFailedError(
                f"behind {PROBE_TOKENS} tokens its probabilities differ by {difference:.2f} from those of the target's "
                "norm and head over the states it gave; it serves another model, or one whose scores are made otherwise"
            )

    def fetch(self, ids: Sequence[int]) -> Tensor:
        """The states [T, A, D] of a document."""
        return self._ask(ids, seconds=self._seconds)[0]

    def _ask(self, ids: Sequence[int], *, seconds: float, **more: Any) -> tuple[Tensor, Any]:
        if self._model is None:
            raise ServerAwayError("it was never reached")
        name = self._files.new_name()
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"eyas_file": name},
            **more,
        }
        try:
            answer = self._request("POST", "/v1/completions", seconds, body)
            given = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
            if not isinstance(given, dict) or given.get("eyas_file") != name:
                raise DocumentFailedError(
                    "it answers without states: it was not started with eyas's connector (`eyas features serve`)"
                )
            return self._files.take(name, ids, self._given_up), answer
        except BadFileError as error:
            self._files.abandon(name)
            raise DocumentFailedError(str(error)) from error
        except (ServerAwayError, DocumentFailedError):
            self._files.abandon(name)
            raise

    def _get(self, path: str) -> Any:
        try:
            return self._request("GET", path, PROBE_SECONDS)
        except DocumentFailedError as error:
            raise ServerAwayError(str(error)) from error

    def _request(self, method: str, path: str, seconds: float, body: object = None) -> Any:
        """One answer; a kept connection that the server closed meanwhile is opened anew, once."""
        data = None if body is None else json.dumps(body).encode()
        for attempt in (1, 2):
            connection, kept = self._connection(seconds)
            try:
                connection.request(method, self._path + path, data, _headers())
                response = connection.getresponse()
                text = response.read()
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                if kept and attempt == 1 and not isinstance(error, TimeoutError):
                    continue
                raise ServerAwayError(str(error) or type(error).__name__) from error
            if response.status in (502, 503, 504):
                raise ServerAwayError(f"it answers {response.status}")
            if response.status != 200:
                raise DocumentFailedError(f"it answers {response.status}: {text[:300].decode(errors='replace')}")
            try:
                return json.loads(text)
            except ValueError as error:
                raise DocumentFailedError(f"its answer is not JSON ({error})") from error
        raise AssertionError("unreachable")

    def _connection(self, seconds: float) -> tuple[http.client.HTTPConnection, bool]:
        """This thread's connection, and whether it was used before."""
        if self.closed:
            raise ServerAwayError("nothing is asked of it any more")
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is not None:
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            return connection, True
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = self._local.connection = kind(self._host, timeout=seconds)
        with self._guard:
            self._open.add(connection)
        return connection, False

    def _drop(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None
            with self._guard:
                self._open.discard(connection)

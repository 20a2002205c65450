"""Client of one vLLM server that hands out states: requests over HTTP, the files it writes, and whether it is healthy.

If a request fails, either the document or the server is at fault. To find out, the server is asked for a few tokens
that every server can process, and its probabilities are compared with those of the target's own head over its states.
If that works, the document was at fault. The same probe tells at the start whether it serves the right target.

Shapes: T tokens, A captured layers, D hidden size, V vocabulary.
"""

import http.client
import itertools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.errors import UserError
from eyas.target.parts import TargetParts
from eyas.train.served.command import require_series

REQUEST_SECONDS = 600.0
"""Timeout for one document; servers queue."""
PROBE_SECONDS = 60.0
PROBE_TOKENS = 16
FILE_SECONDS = 60.0
"""Seconds that a file may take to appear after its answer: shared disks are slow."""
_SUFFIXES = (".safetensors", ".error", ".part")
MAX_PROBE_ERROR = 0.1
"""Maximum summed difference of a few probabilities: rounding to bfloat16 gives hundredths, a wrong head 1."""


class ServerAwayError(Exception):
    """Raised if the server cannot be reached or is unhealthy; it may come back."""


class DocumentFailedError(Exception):
    """Raised if a server answers but does not deliver this document."""


class BadFileError(DocumentFailedError):
    """Raised for a file that did not appear or has the wrong content."""


@dataclass(frozen=True, kw_only=True)
class StateFiles:
    """Files by which servers hand states to one trainer process: read once, checked, deleted.

    All have the process's own prefix, so a resumed run finds and removes what it left before.
    """

    folder: Path
    prefix: str
    """Prefix of this process among all that share the folder; the same when the run is resumed."""
    captured: tuple[int, ...]
    """Layers whose states a file must contain."""
    hidden_size: int
    seconds: float = field(default_factory=lambda: FILE_SECONDS)
    _life: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def new_name(self) -> str:
        """New unique name."""
        return f"{self.prefix}-{self._life}-{next(self._numbers)}"

    def sweep(self) -> int:
        """Remove all files of this prefix; return their bytes."""
        freed = 0
        for path in self.folder.glob(f"{self.prefix}-*"):
            if path.suffix in _SUFFIXES:
                try:
                    freed += path.stat().st_size
                    path.unlink()
                except FileNotFoundError:  # servers remove old files too
                    continue
        return freed

    def discard(self, name: str) -> None:
        """Remove the file of a failed request. One that appears later is removed by `sweep`, or by the server."""
        for suffix in (".safetensors", ".error"):
            (self.folder / f"{name}{suffix}").unlink(missing_ok=True)

    def take(self, name: str, ids: Sequence[int], given_up: Callable[[], bool]) -> Tensor:
        """States [T, A, D] of a document with these tokens. The file is deleted, valid or not."""
        path = self._appeared(name, given_up)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                layers = json.loads(metadata.get("layer_ids", "null"))
                if layers != list(self.captured):
                    raise BadFileError(f"it has states of the layers {layers}, and {list(self.captured)} are needed")
                theirs = file.get_tensor("token_ids").tolist()
                states_TAD: Tensor = file.get_tensor("hidden_states").clone()
        except (OSError, SafetensorError, ValueError) as error:
            raise BadFileError(f"{path.name} cannot be read ({error})") from error
        finally:
            path.unlink(missing_ok=True)
        if theirs != list(ids):
            raise BadFileError(f"it is of {len(theirs)} other tokens than the {len(ids)} that were sent")
        expected = (len(ids), len(self.captured), self.hidden_size)
        if tuple(states_TAD.shape) != expected:
            raise BadFileError(f"its states have the shape {tuple(states_TAD.shape)}, not {expected}")
        if not bool(states_TAD.isfinite().all()):
            raise BadFileError("its states are not finite")
        return states_TAD

    def _appeared(self, name: str, given_up: Callable[[], bool]) -> Path:
        path, error = self.folder / f"{name}.safetensors", self.folder / f"{name}.error"
        deadline, pause = time.monotonic() + self.seconds, 0.001
        while not path.exists():
            if error.exists():
                reason = error.read_text(errors="replace")
                error.unlink(missing_ok=True)
                raise BadFileError(f"the server could not write it: {reason}")
            if time.monotonic() > deadline or given_up():
                raise BadFileError(
                    f"{path} did not appear within {self.seconds:g} s of its answer; features.states_folder must be "
                    "the folder that the server writes to, on this machine or on a shared disk"
                )
            time.sleep(pause)
            pause = min(0.1, 2 * pause)
        return path


def _headers() -> dict[str, str]:
    """Headers, with the API key from the variable that vLLM reads too."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


class StatesClient:
    """Client of one server; threads may share it."""

    def __init__(self, url: str, target: TargetParts, files: StateFiles, *, longest: int) -> None:
        self.url = url.rstrip("/")
        self._target, self._files, self._longest = target, files, longest
        parts = urlsplit(self.url)
        self._host, self._path = parts.netloc, parts.path
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connections: dict[int, http.client.HTTPConnection] = {}  # of each thread, kept open
        self._model: str | None = None
        self.closed = False

    def close(self) -> None:
        """Cancel the requests of all threads and refuse new ones."""
        self.closed = True
        for connection in list(self._connections.values()):
            if (sock := connection.sock) is not None:
                with suppress(OSError):  # the server may have closed it
                    sock.shutdown(socket.SHUT_RDWR)

    def connect(self) -> None:
        """Check version, model and a few states; raise `UserError` if it is the wrong server."""
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
        """Compare the target's head over fetched states with the server's own probabilities."""
        ids = [(3 + 7 * i) % self._target.facts.vocab_size for i in range(PROBE_TOKENS)]
        states_TAD, answer = self._ask(ids, seconds=PROBE_SECONDS, logprobs=8, return_tokens_as_token_ids=True)
        try:
            said = answer["choices"][0]["logprobs"]["top_logprobs"][0]
            theirs = {int(token.removeprefix("token_id:")): float(value) for token, value in said.items()}
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise DocumentFailedError(f"it returns no logprobs of token ids ({error})") from error
        norm, head = self._target.norm, self._target.head
        assert norm is not None
        state_D = norm(states_TAD[-1, -1].to(self._target.device, self._target.dtype)[None])
        p_V = head.scores(state_D)[0].float().softmax(dim=-1).cpu()
        found = torch.tensor(list(theirs.values())).exp()
        difference = float((p_V[list(theirs)] - found).abs().sum())
        if not difference <= MAX_PROBE_ERROR:
            raise DocumentFailedError(
                f"after {PROBE_TOKENS} tokens its probabilities differ by {difference:.2f} from those of the target's "
                "norm and head over the states it returned; it serves another model, or one that computes logits in "
                "another way"
            )

    def fetch(self, ids: Sequence[int]) -> Tensor:
        return self._ask(ids, seconds=REQUEST_SECONDS)[0]

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
            return self._files.take(name, ids, lambda: self.closed), answer
        except (ServerAwayError, DocumentFailedError):
            self._files.discard(name)
            raise

    def _get(self, path: str) -> Any:
        try:
            return self._request("GET", path, PROBE_SECONDS)
        except DocumentFailedError as error:
            raise ServerAwayError(str(error)) from error

    def _request(self, method: str, path: str, seconds: float, body: object = None) -> Any:
        """Send a request on this thread's connection; retry once if the server has closed a kept one meanwhile."""
        if self.closed:
            raise ServerAwayError("the client is closed")
        connection = self._connections.setdefault(threading.get_ident(), self._kind(self._host))
        connection.timeout = seconds
        if kept := connection.sock is not None:
            connection.sock.settimeout(seconds)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._path + path, data, _headers())
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()  # the next request opens it again
            if kept and not isinstance(error, TimeoutError):
                return self._request(method, path, seconds, body)
            raise ServerAwayError(str(error) or type(error).__name__) from error
        if response.status in (502, 503, 504):
            raise ServerAwayError(f"it answers {response.status}")
        if response.status != 200:
            raise DocumentFailedError(f"it answers {response.status}: {text[:300].decode(errors='replace')}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise DocumentFailedError(f"its answer is not JSON ({error})") from error

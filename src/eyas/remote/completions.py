"""Completions as token ids by `/v1/completions`, in whichever of three ways a server reports ids."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from eyas.errors import UserError
from eyas.remote.address import error_message
from eyas.remote.server_pool import BrokenReplyError, RemoteServer, RetryPolicy

PATH = "/v1/completions"
TOKEN_IDS: Mapping[str, Any] = {"return_token_ids": True}
WAYS: tuple[Mapping[str, Any], ...] = (
    TOKEN_IDS,
    {"logprobs": 1, "return_tokens_as_token_ids": True},
    {"logprobs": 1},
)
"""Request fields that make servers report token ids, the best first."""
ID_PREFIX = "token_id:"
TRIAL_TOKENS = 8
BUSY_TRIES = 60
UNFINISHED = "\ufffd"
"""Text of a part of a character; many tokens have it."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer of a server."""

    ids: tuple[int, ...] | None
    text: str
    stopped: bool
    """Ended by a stop token or stop string, rather than by a length limit."""
    missing_stop: bool
    """The server counts one token more: a stop token that it does not report."""
    stop_id: int | None
    """The stop token, if the server names it."""


class TokenNames:
    """Finds token ids from a text and the texts of its tokens (`logprobs`), where these are unambiguous.

    They are the tokenizer's own ids if it splits the text at the same places and no other token has the same text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def find_ids(self, text: str, names: Sequence[str], before: int) -> tuple[int, ...] | None:
        """The ids of `text`, split into `names`, after the token `before`; None if they are not certain."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != len(names) or UNFINISHED in "".join(names):
            return None
        for id_, name in zip(ids, names, strict=True):
            if self._read(id_) != name:
                return None
            # Tokens with the same text may differ after another token, by a leading space.
            pair = self._read(before, id_)
            if any(other != id_ and self._read(before, other) == pair for other in self._ids_by_name[name]):
                return None
            before = id_
        return tuple(ids)

    def _read(self, *ids: int) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def _ids_by_name(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for id_ in sorted(self._tokenizer.get_vocab().values()):
            found.setdefault(self._read(id_), []).append(id_)
        return found


class CompletionReader:
    """Reads replies of servers that use this tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._names, self._vocab_size = TokenNames(tokenizer), vocab_size

    def read(self, reply: Any, prompt: Sequence[int], server: RemoteServer) -> Completion:
        choice = _choice(reply)
        read_ids = choice.get("prompt_token_ids")
        if isinstance(read_ids, list) and read_ids != list(prompt):
            raise UserError(
                f"{server.address.url} read {len(read_ids)} tokens where {len(prompt)} were sent, or others; it must "
                "take token ids as they are"
            )
        text, reason = str(choice.get("text") or ""), choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise BrokenReplyError(f"an answer that ended with {reason!r}")
        ids = self._ids(choice, text, prompt)
        if ids is not None and ids and max(ids) >= self._vocab_size:
            raise UserError(
                f"{server.address.url} generated token {max(ids)} and the target knows 0 to {self._vocab_size - 1}; "
                "give --target the model that it serves"
            )
        usage = reply.get("usage")
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        why = choice.get("stop_reason")
        return Completion(
            ids=ids,
            text=text,
            stopped=reason == "stop",
            missing_stop=ids is not None and counted == len(ids) + 1,
            stop_id=why if isinstance(why, int) else None,
        )

    def _ids(self, choice: Mapping[str, Any], text: str, prompt: Sequence[int]) -> tuple[int, ...] | None:
        told = choice.get("token_ids")
        if _are_ids(told):
            return tuple(told)
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, dict):
            return None
        entries = logprobs.get("content")
        if isinstance(entries, list) and entries and _are_ids(by_id := [_id_of(entry) for entry in entries]):
            return tuple(by_id)
        names = logprobs.get("tokens")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return None
        if names and all(name.startswith(ID_PREFIX) and name[len(ID_PREFIX) :].isdecimal() for name in names):
            return tuple(int(name[len(ID_PREFIX) :]) for name in names)
        return self._names.find_ids(text, names, prompt[-1])


class ServerTrial:
    """Tries a server with a short prompt: it must report token ids, and have the target's tokenizer."""

    def __init__(
        self,
        reader: CompletionReader,
        prompt: Sequence[int],
        *,
        body: Mapping[str, Any],
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int], bool], str],
        max_length: int,
        report: Callable[[str], None],
    ) -> None:
        """`body` has the fields of every request; `decode` takes ids and whether to skip special tokens."""
        self._reader, self._prompt, self._body = reader, tuple(prompt), body
        self._stop_ids, self._decode, self._max_length, self._report = stop_ids, decode, max_length, report

    async def __call__(self, server: RemoteServer) -> Mapping[str, Any]:
        """The request fields that make this server report token ids."""
        url, most = server.address.url, server.card.get("max_model_len")
        if isinstance(most, int) and most < self._max_length:
            raise UserError(f"--max-length {self._max_length} is above the {most} tokens that {url} serves; lower it")
        told = "it answers without them"
        for way in WAYS:
            status, reply = await self._ask(server, way)
            if status != 200:
                told = f"{status}: {error_message(reply)}"
                if status in (401, 403):
                    raise UserError(f"{url} lets only holders of a key in ({told}); give --api-key")
                continue
            try:
                completion = self._reader.read(_json(reply), self._prompt, server)
            except BrokenReplyError as error:
                told = str(error)
                continue
            if completion.ids is None:
                continue
            self._require_same_words(completion, url)
            if way is not TOKEN_IDS:
                self._report(
                    f"note: {url} does not know return_token_ids; ids come from its logprobs, and an answer whose ids "
                    "are not certain is left out and counted (inexact)"
                )
            return way
        raise UserError(
            f"{url} does not tell which tokens it generates ({told}), and a drafter must be trained on those; it needs "
            "return_token_ids (vLLM, SGLang, eyas serve), or logprobs"
        )

    async def _ask(self, server: RemoteServer, way: Mapping[str, Any]) -> tuple[int, bytes]:
        body = {**self._body, "model": server.card["id"], "prompt": list(self._prompt), "max_tokens": TRIAL_TOKENS}
        for failures in range(BUSY_TRIES):
            status, reply, wait = await server.post(PATH, {**body, "temperature": 0, **way})
            if status not in (429, 503):
                break
            await asyncio.sleep(max(wait, RetryPolicy().delay(failures)))
        return status, reply

    def _require_same_words(self, completion: Completion, url: str) -> None:
        """Refuse a server with another tokenizer."""
        ids = [id_ for id_ in completion.ids or () if id_ not in self._stop_ids]
        ours = {self._decode(ids, skip).strip().strip(UNFINISHED) for skip in (True, False)}
        if not any(completion.text.strip().strip(UNFINISHED).startswith(text) for text in ours):
            raise UserError(
                f"{url} reads tokens {ids} as {completion.text!r}, and the target's tokenizer as {max(ours)!r}; give "
                "--target the model that it serves"
            )


def _choice(reply: Any) -> Mapping[str, Any]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BrokenReplyError(f"an answer without its one choice: {str(reply)[:120]}")
    return choices[0]


def _are_ids(told: Any) -> TypeGuard[list[int]]:
    return isinstance(told, list) and all(type(id_) is int and id_ >= 0 for id_ in told)


def _id_of(entry: Any) -> Any:
    return entry.get("id") if isinstance(entry, dict) else None


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise UserError(f"a server answered {body[:80]!r}, which is not JSON; check the address") from error

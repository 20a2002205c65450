"""Token ids are certainly those that the server generated, or there are none."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from each import each
from eyas.errors import UserError
from eyas.remote.address import Address
from eyas.remote.completions import WAYS, CompletionReader, ServerTrial, TokenNames
from eyas.remote.server_pool import BrokenReplyError, RemoteServer

VOCAB = ["a", "b", "ab", "Ġ", "Ġab", "c", "d", "cd", "Ã", "©"]
MERGES = [("a", "b"), ("Ġ", "ab"), ("c", "d")]


@pytest.fixture(name="tokenizer")
def tokenizer_fixture() -> PreTrainedTokenizerFast:
    """Letters, parts of a character, and `<e>`, which ends answers."""
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCAB)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<e>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")


END = len(VOCAB)


def test_token_texts_give_ids_only_if_unambiguous(tokenizer: PreTrainedTokenizerFast) -> None:
    names = TokenNames(tokenizer)
    assert names.find_ids("ab abcd", ["ab", " ab", "cd"], 0) == (2, 4, 7)
    assert names.find_ids("", [], 0) == ()
    # The model cut the text in another way than the tokenizer does: its ids are not known.
    assert names.find_ids("ab", ["a", "b"], 0) is None
    assert names.find_ids("abcd", ["ab", "c", "d"], 0) is None
    # As many tokens, cut elsewhere.
    assert names.find_ids("abcd", ["a", "bcd"], 0) is None
    # Halves of a character all read alike.
    assert names.find_ids("é", ["\ufffd", "\ufffd"], 0) is None
    assert names.find_ids("ab<e>", ["ab", "<e>"], 0) == (2, END)


def test_a_token_with_the_text_of_another_is_ambiguous(tokenizer: PreTrainedTokenizerFast) -> None:
    assert TokenNames(tokenizer).find_ids("abcd", ["ab", "cd"], 0) == (2, 7)
    assert TokenNames(Twin(tokenizer)).find_ids("abcd", ["ab", "cd"], 0) is None  # type: ignore[arg-type]


class Twin:
    """A tokenizer with one more token, whose text is `cd`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._inner = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._inner.decode([7 if i == 99 else i for i in ids], skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        return {**self._inner.get_vocab(), "twin": 99}


def server() -> RemoteServer:
    return RemoteServer(address=Address.of("http://s"), session=None, card={"id": "m"})  # type: ignore[arg-type]


def reply(**choice: Any) -> dict[str, Any]:
    usage = choice.pop("usage", None)
    return {"choices": [{"text": "abcd", "finish_reason": "stop", **choice}], "usage": usage}


@each(
    "choice",
    [
        {"token_ids": [2, 7]},
        {"logprobs": {"tokens": ["token_id:2", "token_id:7"]}},
        {"logprobs": {"content": [{"id": 2, "token": "ab"}, {"id": 7, "token": "cd"}]}},
        {"logprobs": {"tokens": ["ab", "cd"]}},
    ],
)
def test_ids_are_read_in_every_format(choice: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    reader = CompletionReader(tokenizer, END + 1)
    read = reader.read(reply(**choice), [0, 1], server())
    assert (read.ids, read.stopped, read.missing_stop) == ((2, 7), True, False)
    assert reader.read(reply(**choice, usage={"completion_tokens": 3}), [0, 1], server()).missing_stop


def test_invalid_replies_are_errors(tokenizer: PreTrainedTokenizerFast) -> None:
    reader = CompletionReader(tokenizer, END + 1)
    assert reader.read(reply(), [0], server()).ids is None
    assert reader.read(reply(logprobs={"tokens": ["a", "b", "cd"]}), [0], server()).ids is None
    for broken in ({}, {"choices": []}, [], reply(finish_reason="abort"), reply(finish_reason=None)):
        with pytest.raises(BrokenReplyError):
            reader.read(broken, [0], server())
    with pytest.raises(UserError, match="read 3 tokens where 1 were sent"):
        reader.read(reply(token_ids=[2], prompt_token_ids=[5, 0, 1]), [0], server())
    with pytest.raises(UserError, match="generated token 500 and the target knows 0 to 10"):
        reader.read(reply(token_ids=[500]), [0], server())


class Knows(RemoteServer):
    """A server that supports some fields, refuses or ignores the others, and answers `abcd`."""

    def __init__(self, *fields: str, strict: bool, text: str = "abcd", **card: Any) -> None:
        super().__init__(address=Address.of("http://s"), session=None, card={"id": "m", **card})  # type: ignore[arg-type]
        self._fields, self._strict, self._text = fields, strict, text

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes, float]:
        for name in ("return_token_ids", "return_tokens_as_token_ids", "logprobs"):
            if name in body and name not in self._fields and self._strict:
                return 400, json.dumps({"error": {"message": f"unknown field {name}"}}).encode(), 0.0
        asked = [name for name in self._fields if name in body]
        choice: dict[str, Any] = {"text": self._text}
        if "return_token_ids" in asked:
            choice["token_ids"] = [2, 7]
        elif "logprobs" in asked:
            as_ids = "return_tokens_as_token_ids" in asked
            choice["logprobs"] = {"tokens": ["token_id:2", "token_id:7"] if as_ids else ["ab", "cd"]}
        return 200, json.dumps(reply(**choice)).encode(), 0.0


@each("strict", [True, False])
@each(
    ("fields", "way", "notes"),
    [
        (("return_token_ids", "logprobs"), 0, 0),
        (("logprobs", "return_tokens_as_token_ids"), 1, 1),
        (("logprobs",), 2, 1),
    ],
)
def test_a_server_is_asked_for_ids_in_the_best_way_it_knows(
    strict: bool, fields: tuple[str, ...], way: int, notes: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    told: list[str] = []
    found = asyncio.run(trial(tokenizer, told)(Knows(*fields, strict=strict)))
    if not strict and way == 2:  # it ignores the wish for ids, and its texts are read at once
        way = 1
    assert found == WAYS[way]
    assert len(told) == notes
    assert all("does not know return_token_ids" in note for note in told)


def test_a_server_without_ids_or_with_another_tokenizer_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    for strict, why in ((True, "400: unknown field logprobs"), (False, "it answers without them")):
        with pytest.raises(UserError, match=f"does not tell which tokens it generates .{why}"):
            asyncio.run(trial(tokenizer)(Knows(strict=strict)))
    with pytest.raises(UserError, match=r"reads tokens \[2, 7\] as 'other', and the target's tokenizer as 'abcd'"):
        asyncio.run(trial(tokenizer)(Knows("return_token_ids", strict=False, text="other")))
    with pytest.raises(UserError, match="--max-length 100 is above the 64 tokens"):
        asyncio.run(trial(tokenizer)(Knows("return_token_ids", strict=False, max_model_len=64)))


def trial(tokenizer: PreTrainedTokenizerFast, told: list[str] | None = None) -> ServerTrial:
    return ServerTrial(
        CompletionReader(tokenizer, END + 1),
        [0, 1],
        body={},
        stop_ids=frozenset({END}),
        decode=lambda ids, skip: str(tokenizer.decode(list(ids), skip_special_tokens=skip)),
        max_length=100,
        report=(told if told is not None else []).append,
    )

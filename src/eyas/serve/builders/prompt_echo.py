"""A prompt that comes back before its answer, in the format of text completions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.engine.detokenizer import TextStream
from eyas.engine.logprobs import TokenLogprobs
from eyas.engine.output import OutputDelta
from eyas.engine.request import FinishReason
from eyas.serve.builders.token_text import TokenText
from eyas.target.text import TargetText


@dataclass(frozen=True, kw_only=True)
class PromptEcho:
    """A prompt as text, and the part of it that each token is."""

    tokens: tuple[int, ...]
    text: str
    texts: tuple[str, ...]

    @classmethod
    def of(cls, tokens: tuple[int, ...], given: str | None, target: TargetText) -> "PromptEcho":
        """The echo of tokens; `given` is the text that the client sent, if it sent one.

        Special tokens are told, unless the tokenizer put them there: then the text is the client's without them.
        """
        texts = _texts(tokens, target, skip_special_tokens=False)
        if given is not None and "".join(texts) != given:
            texts = _texts(tokens, target, skip_special_tokens=True)
        return cls(tokens=tokens, text="".join(texts), texts=tuple(texts))

    def logprobs(self, entries: Sequence[TokenLogprobs], token_text: TokenText, as_ids: bool) -> dict[str, Any]:
        """Logprobs of its tokens. Nothing comes before the first, so it has none."""
        told = token_text.completion_logprobs(entries, self.texts[1:], len(self.texts[0]), as_ids)
        first = {
            "tokens": token_text.name(self.tokens[0], as_ids),
            "token_logprobs": None,
            "top_logprobs": None,
            "text_offset": 0,
        }
        return {name: [value, *told[name]] for name, value in first.items()}


def without_answer(delta: OutputDelta) -> OutputDelta:
    """The same without the one token that an engine chooses even if none is asked for."""
    logprobs = None if delta.logprobs is None else ()
    return replace(
        delta, tokens=(), texts=(), depths=(), logprobs=logprobs, finished=FinishReason.LENGTH, stop_reason=None
    )


def _texts(tokens: Sequence[int], target: TargetText, *, skip_special_tokens: bool) -> list[str]:
    """The text of each token as it continues those before it."""
    stream = TextStream(lambda some: target.decode(some, skip_special_tokens))
    texts = [stream.push(token) for token in tokens]
    texts[-1] += stream.finish()
    return texts

"""Finds evaluation prompts in training conversations (contamination).

Three grades, as usual for language models: the prompt occurs word for word; its beginning or half of its 13-grams
occur; a single 13-gram occurs, which may be a common phrase.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from enum import StrEnum

from eyas.data.conversations import Conversation

NGRAM = 13
"""Consecutive words that two texts rarely share by chance (as for GPT-3)."""
PREFIX = 200
"""Characters of normalised text that count as the beginning of a prompt."""
NEAR_SHARE = 0.5
"""Share of a prompt's 13-grams in a conversation that counts as near."""


class Overlap(StrEnum):
    """How much of a prompt a conversation contains, strongest first."""

    exact = "exact"
    near = "near"
    shared = "shared"


class PromptIndex:
    """Index of prompts to look for; can be pickled."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self.where = [conversation.where for conversation in conversations]
        self._exact: dict[str, list[int]] = defaultdict(list)
        self._beginnings: dict[str, list[int]] = defaultdict(list)
        self._grams: dict[str, list[int]] = defaultdict(list)
        self._sizes: list[int] = []
        for number, conversation in enumerate(conversations):
            text = normalise(first_prompt(conversation))
            grams = _ngrams(text)
            self._exact[text].append(number)
            self._beginnings[text[:PREFIX]].append(number)
            for gram in grams:
                self._grams[gram].append(number)
            self._sizes.append(len(grams))

    def find(self, conversation: Conversation) -> dict[int, Overlap]:
        """The prompts that a conversation contains, by number."""
        found: dict[int, Overlap] = {}
        said = [normalise(str(message["content"])) for message in conversation.messages]
        hits = Counter(number for gram in set().union(*map(_ngrams, said)) for number in self._grams.get(gram, ()))
        for number, shared in hits.items():
            found[number] = Overlap.near if shared >= NEAR_SHARE * self._sizes[number] else Overlap.shared
        asked = [text for text, message in zip(said, conversation.messages, strict=True) if message["role"] == "user"]
        for text in asked:
            found |= dict.fromkeys(self._beginnings.get(text[:PREFIX], ()), Overlap.near)
        for text in asked:
            found |= dict.fromkeys(self._exact.get(text, ()), Overlap.exact)
        return found


def normalise(text: str) -> str:
    """The words of a text in lower case, with single spaces."""
    return " ".join(re.findall(r"\w+", text.lower()))


def first_prompt(conversation: Conversation) -> str:
    """The first user message."""
    return next((str(message["content"]) for message in conversation.messages if message["role"] == "user"), "")


def _ngrams(text: str) -> set[str]:
    words = text.split()
    return {" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}

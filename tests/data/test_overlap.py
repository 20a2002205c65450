"""Prompts of an evaluation are found in conversations, in three grades."""

import pickle

from eyas.data.conversations import Conversation
from eyas.data.overlap import Overlap, PromptIndex

WORDS = [f"word{i}" for i in range(60)]
PROMPT = "Please: " + ", ".join(WORDS) + "?"


def asked(text: str, answer: str = "Yes.") -> Conversation:
    messages = ({"role": "user", "content": text}, {"role": "assistant", "content": answer})
    return Conversation(messages=messages, where="f:1")


def index() -> PromptIndex:
    made = PromptIndex([asked("Name a bird."), asked(PROMPT)])
    return pickle.loads(pickle.dumps(made))  # type: ignore[no-any-return]


def test_prompts_are_found_despite_case_and_punctuation() -> None:
    assert index().find(asked("name  a bird!")) == {0: Overlap.exact}
    assert index().find(asked(PROMPT.upper())) == {1: Overlap.exact}


def test_the_same_beginning_or_half_of_the_text_is_near() -> None:
    assert index().find(asked(PROMPT + " And then something else entirely.")) == {1: Overlap.near}
    assert index().find(asked("Consider this. " + " ".join(WORDS[:45]))) == {1: Overlap.near}
    assert index().find(asked("What was asked?", answer=" ".join(WORDS[10:]))) == {1: Overlap.near}


def test_thirteen_words_in_a_row_are_shared_and_twelve_are_not() -> None:
    assert index().find(asked("Well, " + " ".join(WORDS[20:33]))) == {1: Overlap.shared}
    assert index().find(asked("Well, " + " ".join(WORDS[20:32]))) == {}
    assert index().find(asked("Name a tree.")) == {}

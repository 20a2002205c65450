"""`--chat-template`, `--raw`, `--chat-template-kwargs`: another chat template than the target's own, other variables.

A template runs in transformers' sandbox, as one that comes with a model does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat, check_variables
from eyas.target.raw_template import raw_template

TRIAL = [{"role": "user", "content": "Hello"}]
"""A conversation that every template must write."""


def read_template(argument: str, *, option: str = "--chat-template") -> str:
    """The text of a template: a file's, or the argument itself if it is Jinja."""
    path = Path(argument).expanduser()
    inline = any(sign in argument for sign in ("{{", "{%", "\n"))
    try:
        if not inline or path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if not inline:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"{option} {argument} cannot be read: {reason}; give a file, or a template itself, which holds "
                "{{ or {%"
            ) from error
    return argument


def set_template(tokenizer: PreTrainedTokenizerBase, template: str, variables: Mapping[str, Any] | None = None) -> None:
    """Let a tokenizer write conversations by this template; refused if it cannot write the plainest one."""
    tokenizer.chat_template = template
    try:
        text = tokenizer.apply_chat_template(TRIAL, tokenize=False, add_generation_prompt=True, **(variables or {}))
    except Exception as error:  # Jinja's own, and whatever its expressions may raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"the chat template that was given cannot write a user's message ({reason}); mend it"
        ) from error
    if TRIAL[0]["content"] not in str(text):
        raise UserError("the chat template that was given leaves out what the user says; mend it")


def apply_format(tokenizer: PreTrainedTokenizerBase, chat_format: ChatFormat) -> None:
    """Let a tokenizer write conversations as the run wants it; variables are checked and stay the caller's to pass."""
    check_variables(tokenizer, chat_format.variables, "the run")
    if chat_format.raw:
        tokenizer.chat_template = raw_template(tokenizer)
    elif chat_format.template is not None:
        set_template(tokenizer, chat_format.template, chat_format.variables)

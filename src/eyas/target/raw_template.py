"""`--raw`: the built-in template of targets that have none: plain text in, its continuation out.

Contents stand one behind the other. What the target says continues the text directly; what others say behind something
begins a new line. Only the last message, if it is the assistant's, ends with the tokenizer's end of text: in a longer
conversation the text goes on.
Invariant: a prompt has the ids that the tokenizer gives to plain text, with the special tokens that it puts before one.
"""

import logging

from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROBE = "Hello there"

TEMPLATE = """
{%- macro text_of(message) -%}
{%- if message.tool_calls %}{{ raise_exception('plain text has no place for tool calls') }}{% endif -%}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}{{ part if part is string else part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{{- PREFIX -}}
{%- for message in messages -%}
{%- if not loop.first and message.role != 'assistant' %}{{ '\\n' }}{% endif -%}
{{- text_of(message) -}}
{%- if loop.last and message.role == 'assistant' and not add_generation_prompt %}{{ eos_token }}{% endif -%}
{%- endfor -%}"""
"""With PREFIX for what this tokenizer needs before plain text."""


def raw_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template for one tokenizer."""
    return TEMPLATE.replace("PREFIX", ascii(_prefix(tokenizer)))


def _prefix(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text whose tokens, without special ones added, begin as the tokenizer begins plain text: often a BOS, or nothing.

    Behind a BOS some tokenizers leave out the space that they put before the first word; then it is written.
    """
    plain: list[int] = tokenizer.encode(PROBE, add_special_tokens=False)
    whole: list[int] = tokenizer.encode(PROBE)
    # A tokenizer may put an end of text behind plain text as well: not behind one that is to be continued.
    lead = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    bos = str(tokenizer.decode(whole[:lead])) if lead else ""
    for prefix in (bos, bos + " "):
        if tokenizer.encode(prefix + PROBE, add_special_tokens=False) == whole[:lead] + plain:
            return prefix
    logger.warning(f"the tokenizer of {tokenizer.name_or_path} reads its own beginning of a text {bos!r} otherwise")
    return bos

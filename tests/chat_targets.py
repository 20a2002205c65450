"""Small random targets with the chat templates and special tokens of well-known families, as folders."""

import string
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from chat_tokenizer import letter_tokenizer
from tiny import target_config

LETTERS = ["Ġ", "Ċ", *string.ascii_lowercase]
"""Few, so that special tokens are common in the answers of a random model."""

# Writes a think block around every last answer, drops thinking from earlier ones, and opens or closes it on demand.
QWEN3_LIKE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{%- set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{%- if loop.last %}{{ '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}{%- endif %}"
    "{{- said }}{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined %}{{- '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}"
    "{%- endif %}{%- endif %}"
)
# Channels; an answer that was ended by one token is written with another later on, and without its analysis.
GPT_OSS_LIKE = (
    "{{- '<|start|>system<|message|>be kind<|end|>' }}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- if m.thinking and loop.last %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
# No fields for thinking: it is part of the content, and stays.
MISTRAL_LIKE = (
    "{{- '<s>' }}{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' %}{%- if not m.content %}{{- raise_exception('empty') }}{%- endif %}"
    "{{- m.content + '</s>' }}{%- if false %}[TOOL_CALLS][THINK][/THINK]{%- endif %}{%- endif %}{%- endfor %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    likely: tuple[str, ...]
    """Tokens that the model generates more often than by chance."""


FAMILIES = {
    "qwen3": Family(
        template=QWEN3_LIKE,
        special=("</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        stops=("<|im_end|>", "</s>"),
        likely=("</think>", "<|im_end|>"),
    ),
    "gpt-oss": Family(
        template=GPT_OSS_LIKE,
        special=("</s>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"),
        stops=("<|return|>", "<|call|>", "</s>"),
        likely=("<|channel|>", "<|message|>"),
    ),
    "mistral": Family(
        template=MISTRAL_LIKE,
        special=("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[THINK]", "[/THINK]"),
        stops=("</s>",),
        likely=("[THINK]", "[/THINK]", "[TOOL_CALLS]"),
    ),
}


def save_target(family: Family, folder: Path) -> Path:
    """Save a random model whose next tokens are about equally likely, except for a few."""
    tokenizer = letter_tokenizer(family.template, family.special, LETTERS)
    torch.manual_seed(0)
    model = LlamaForCausalLM(target_config(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2))
    with torch.no_grad():
        likely = [tokenizer.convert_tokens_to_ids(token) for token in family.likely]
        model.lm_head.weight[likely] += 0.15 * model.lm_head.weight.std() * torch.randn(64).sign()
    stops = [tokenizer.convert_tokens_to_ids(token) for token in family.stops]
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.9, top_p=0.98, eos_token_id=stops)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

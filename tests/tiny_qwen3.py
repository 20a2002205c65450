"""A tiny Qwen3 with random weights whose chat template behaves as the real one does.

ChatML with thinking: `<think>` is the target's own to say; `enable_thinking = false` puts an empty block into the
prompt; thinking of earlier turns is dropped; a last answer that is rendered without thinking gets an empty block.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are not special, as in the real tokenizer."""

TEMPLATE = """\
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.asked = messages.index(m) -%}{%- endfor -%}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools -%}
<|im_start|>system
{{ system }}

You may call functions:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif system -%}
<|im_start|>system
{{ system }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' -%}
{%- set said = m.content or '' -%}
{%- set thought = m.reasoning_content or '' -%}
{%- if not thought and '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
<|im_start|>assistant
{% if loop.index0 > ns.asked and (loop.last or thought) -%}
<think>
{{ thought.strip('\\n') }}
</think>

{% endif -%}
{{ said }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the markers of the real tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def save(folder: Path) -> None:
    """Write weights, tokenizer and generation config, as on the hub."""
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    ends = [words.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    model.generation_config.update(eos_token_id=ends, do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    model.save_pretrained(folder)
    words.save_pretrained(folder)

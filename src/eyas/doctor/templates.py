"""Chat templates of other families, as plain as they come: what a server uses when it is given the wrong one.

Their markers are no special tokens of the target at hand and reach it as text, which is what happens in production.
"""

FOREIGN_TEMPLATES = {
    "ChatML": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "Llama-3": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{{ m['content'] }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "Mistral": (
        "<s>{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}</s>"
        "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
    ),
    "Gemma": (
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n"
        "{{ m['content'] }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
}

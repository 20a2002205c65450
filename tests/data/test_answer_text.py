"""Generated text of answers, for templates that open, render and rewrite turns in different ways."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chat_tokenizer import CHATML, chat_tokenizer
from each import each
from eyas.data.chat_encoder import ChatEncoder
from eyas.data.conversations import Conversation, Message
from eyas.errors import UserError

END = "<|im_end|>"
STOPS = ("</s>", END, "<|user|>", "<|tool|>", "<|return|>", "<|call|>")
SPECIAL = ("<s>", "<|im_start|>", "<|assistant|>", "<|begin|>", *STOPS)

Q: Message = {"role": "user", "content": "Hi"}
QUESTION_MORE: Message = {"role": "user", "content": "And?"}
A: Message = {"role": "assistant", "content": "Hello"}
THOUGHT: Message = {"role": "assistant", "content": "Hello", "reasoning_content": "Hm"}
INLINE: Message = {"role": "assistant", "content": "<think>\nHm\n</think>\n\nHello"}
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}]
CALL: Message = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT: Message = {"role": "tool", "content": "seen", "tool_call_id": "call_1"}

USERS = (
    "{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>assistant\n"
)
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n"

# Reasoning only behind the last question; a finished turn there has a block even if nobody thought.
FORGETFUL = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}"
    + USERS
    + "{% set r = m.reasoning_content or '' %}{% set c = m.content %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].strip() %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}"
    "{% for t in m.tool_calls or [] %}<call>{{ t.function.name }}{{ t.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}" + OPEN
)
QWEN_LIKE = FORGETFUL + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
ALWAYS_OPEN = FORGETFUL + "<think>\n{% endif %}"
# The prompt opens reasoning of which no rendering has anything, as DeepSeek R1's.
DROPS_REASONING = (
    "{% for m in messages %}"
    + USERS
    + "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endif %}{% endfor %}"
    + OPEN
    + "<think>\n{% endif %}"
)
# A turn without reasoning is rendered with the closing tag alone.
CLOSES_ONLY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}{% endif %}</think>{{ m.content }}{% if m.tool_calls %}"
    "<call>{{ m.tool_calls[0].function.name }}</call>{% endif %}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}<|begin|>{{ m.role }}{% if m.role == 'assistant' %}{% if m.tool_calls %} to={{ "
    "m.tool_calls[0].function.name }}<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
    "{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|begin|>assistant"
    "{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
)
# Thinking is turned off in the prompt by an empty block of its own kind; the content has a wrapping that is said.
WRAPPED = (
    "{% for m in messages %}"
    + USERS
    + "{% if m.reasoning %}<|START_THINKING|>{{ m.reasoning }}<|END_THINKING|>{% endif %}"
    "<|START_TEXT|>{{ m.content }}<|END_TEXT|><|im_end|>\n{% endif %}{% endfor %}"
    + OPEN
    + "<|START_THINKING|>{% if not reasoning %}<|END_THINKING|>{% endif %}{% endif %}"
)
# Parts are closed by a marker and their name, so that the end of the reasoning is no marker of its own.
NAMED_PARTS = (
    "{% for m in messages %}" + USERS + "<open>think<sep>{{ m.reasoning_content or '' }}<close>think<sep>"
    "<open>response<sep>{{ m.content }}<close>response<sep><|im_end|>\n{% endif %}{% endfor %}"
    + OPEN
    + "<open>think<sep>{% endif %}"
)
# Another opening than a rendering has.
OTHER_HEADER = (
    "{% for m in messages %}({{ m.role }}){{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant speaks]{% endif %}"
)
# The prompt begins what the target says, without any tag.
BEGINS_TALKING = (
    "{% for m in messages %}" + USERS + "{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}\n[FINAL]\n"
    "{% endif %}{{ m.content }}{{ '' if loop.last else '\n<|im_end|>\n' }}{% endif %}{% endfor %}"
    + OPEN
    + "Steps:\n{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for b in m.content %}{{ '[THINK]' + b.thinking + '[/THINK]' if b.type == 'thinking' else b.text }}{% endfor %}"
    "{% endif %}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
TEXT_ARGUMENTS = (
    "{% for m in messages %}" + USERS + "{{ m.content }}{% for t in m.tool_calls or [] %}"
    "{{ '<call>' + t.function.name + t.function.arguments }}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    + OPEN
    + "{% endif %}"
)
NULL_CONTENT = TEXT_ARGUMENTS.replace("{{ m.content }}{% for t", "{{ m.content or '' }}{% for t").replace(
    "m.tool_calls or []", "((m.tool_calls or []) if m.content is none else [])"
)
SHORT_IDS = TEXT_ARGUMENTS.replace(
    "{{ '<call>' + t.function.name + t.function.arguments }}",
    "{% if t.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}<call>{{ t.function.name }}",
)
NO_BOTH = TEXT_ARGUMENTS.replace(
    "{{ '<call>' + t.function.name + t.function.arguments }}",
    "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}<call>{{ t.function.name }}",
).replace(
    "<|im_start|>assistant\n", "<|im_start|>assistant\n{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}", 1
)
# What stands before the last question goes away with a call.
TOOLS_GO = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% for t in m.tool_calls or [] %}"
    "[CALL]{{ t.function.name }}{% endfor %}</s>{% else %}{% if not messages[-1].tool_calls %}[TOOLS]look[/TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
NEEDS_TOOLS = "{% for tool in tools %}{{ tool }}{% endfor %}" + CHATML


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    return chat_tokenizer(template, special=SPECIAL)


def said(
    template: str, *messages: Message, finished: bool = True, stops: tuple[str, ...] = STOPS, **variables: object
) -> list[tuple[str, str]]:
    """The end of each prompt, and the generated text."""
    chosen = tokenizer(template)
    encoder = ChatEncoder(chosen, chosen.convert_tokens_to_ids(list(stops)), variables=variables)
    conversation = Conversation(messages=messages, where="f:1", finished=finished)
    samples = encoder.samples(conversation)
    texts = [(str(chosen.decode(s.prompt_ids)), str(chosen.decode(s.answer_ids))) for s in samples]
    return [(prompt.rsplit("<|im_start|>", 1)[-1], answer) for prompt, answer in texts]


@each(
    ("template", "variables", "message", "prompt", "answer"),
    [
        (QWEN_LIKE, {}, A, "assistant\n", "Hello"),  # no block that nobody said
        (QWEN_LIKE, {}, THOUGHT, "assistant\n", "<think>\nHm\n</think>\n\nHello"),
        (QWEN_LIKE, {}, INLINE, "assistant\n", "<think>\nHm\n</think>\n\nHello"),
        (QWEN_LIKE, {}, {**A, "content": "<think>Hm</think> Hello"}, "assistant\n", "<think>Hm</think> Hello"),
        (QWEN_LIKE, {"enable_thinking": False}, A, "assistant\n<think>\n\n</think>\n\n", "Hello"),
        (QWEN_LIKE, {"enable_thinking": False}, THOUGHT, "assistant\n<think>\n\n</think>\n\n", "Hello"),
        (ALWAYS_OPEN, {}, A, "assistant\n<think>\n", "Hello"),
        (ALWAYS_OPEN, {}, THOUGHT, "assistant\n<think>\n", "Hm\n</think>\n\nHello"),
        (ALWAYS_OPEN, {}, INLINE, "assistant\n<think>\n", "Hm\n</think>\n\nHello"),
        (ALWAYS_OPEN, {}, {**A, "content": "Hm\n</think>\n\nHello"}, "assistant\n<think>\n", "Hm\n</think>\n\nHello"),
        (DROPS_REASONING, {}, A, "assistant\n<think>\n", "Hello"),
        (DROPS_REASONING, {}, THOUGHT, "assistant\n<think>\n", "Hm\n</think>\n\nHello"),
        (DROPS_REASONING, {}, INLINE, "assistant\n<think>\n", "Hm\n</think>\n\nHello"),
        (WRAPPED, {}, A, "assistant\n<|START_THINKING|><|END_THINKING|>", "<|START_TEXT|>Hello<|END_TEXT|>"),
        (WRAPPED, {}, THOUGHT, "assistant\n<|START_THINKING|><|END_THINKING|>", "<|START_TEXT|>Hello<|END_TEXT|>"),
        (
            WRAPPED,
            {"reasoning": True},
            THOUGHT,
            "assistant\n<|START_THINKING|>",
            "Hm<|END_THINKING|><|START_TEXT|>Hello<|END_TEXT|>",
        ),
        (
            NAMED_PARTS,
            {},
            A,
            "assistant\n<open>think<sep>",
            "<close>think<sep><open>response<sep>Hello<close>response<sep>",
        ),
        (
            NAMED_PARTS,
            {},
            THOUGHT,
            "assistant\n<open>think<sep>",
            "Hm<close>think<sep><open>response<sep>Hello<close>response<sep>",
        ),
        (BEGINS_TALKING, {}, A, "assistant\nSteps:\n", "Hello\n"),
        (BEGINS_TALKING, {}, THOUGHT, "assistant\nSteps:\n", "Hm\n[FINAL]\nHello\n"),
        (BEGINS_TALKING, {}, {**A, "content": "Steps:\nHello"}, "assistant\nSteps:\n", "Hello\n"),
        (CHATML, {}, THOUGHT, "assistant\n", "Hello"),  # a template without reasoning has no place for it
        (CHATML, {}, INLINE, "assistant\n", "<think>\nHm\n</think>\n\nHello"),
        (CHATML, {}, {**A, "content": " Hello\n"}, "assistant\n", " Hello\n"),
    ],
)
def test_an_answer_is_the_generated_text_after_its_prompt(
    template: str, variables: dict[str, object], message: Message, prompt: str, answer: str
) -> None:
    assert said(template, Q, message, **variables) == [(prompt, answer + END)]


@each(
    ("template", "messages", "answers"),
    [
        (CLOSES_ONLY, [Q, A], ["Hello<|user|>"]),
        (CLOSES_ONLY, [Q, THOUGHT, Q, A], ["Hm</think>Hello<|user|>", "Hello<|user|>"]),
        (CLOSES_ONLY, [Q, CALL, RESULT, A], ["<call>look</call><|tool|>", "Hello<|user|>"]),
        (CHANNELS, [Q, A], ["<|channel|>final<|message|>Hello<|return|>"]),
        (
            CHANNELS,
            [Q, THOUGHT, Q, A],
            [
                "<|channel|>analysis<|message|>Hm<|end|><|begin|>assistant<|channel|>final<|message|>Hello<|return|>",
                "<|channel|>final<|message|>Hello<|return|>",
            ],
        ),
        (
            CHANNELS,
            [Q, CALL, RESULT, A],
            [' to=look<|message|>{"at": "it"}<|call|>', "<|channel|>final<|message|>Hello<|return|>"],
        ),
        (OTHER_HEADER, [Q, A, Q, A], ["Hello</s>", "Hello</s>"]),
        (BLOCKS, [Q, A], ["Hello</s>"]),
        (BLOCKS, [Q, THOUGHT], ["[THINK]Hm[/THINK]Hello</s>"]),
        (QWEN_LIKE, [Q, CALL, RESULT, A], [f'<call>look{{"at": "it"}}</call>{END}', f"Hello{END}"]),
        (
            ALWAYS_OPEN,
            [Q, {**CALL, "content": "Wait.", "reasoning": "Hm"}],
            [f'Hm\n</think>\n\nWait.<call>look{{"at": "it"}}</call>{END}'],
        ),
        (TEXT_ARGUMENTS, [Q, CALL, RESULT, A], [f'<call>look{{"at": "it"}}{END}', f"Hello{END}"]),
        (NULL_CONTENT, [Q, CALL, RESULT, A], [f'<call>look{{"at": "it"}}{END}', f"Hello{END}"]),
        (SHORT_IDS, [Q, CALL, RESULT, A], [f"<call>look{END}", f"Hello{END}"]),
        (NO_BOTH, [Q, {**CALL, "content": "Wait.", "thinking": "Hm"}], [f"Wait.<call>look{END}"]),
        (CLOSES_ONLY, [Q, {**A, "content": "", "thinking": "Hm"}], ["Hm</think><|user|>"]),
        (TOOLS_GO, [Q, CALL, RESULT, A], ["[CALL]look</s>", "Hello</s>"]),
        (NEEDS_TOOLS, [Q, A], [f"Hello{END}"]),
        (CHATML, [Q, CALL, RESULT, A], [f"Hello{END}"]),  # nobody knows how it would have called
    ],
)
def test_channels_calls_and_ends_follow_the_template(
    template: str, messages: list[Message], answers: list[str]
) -> None:
    assert [answer for _, answer in said(template, *messages)] == answers


@each(
    ("template", "message", "answer"),
    [
        (QWEN_LIKE, {**A, "content": "<think>\nHm and"}, "<think>\nHm and"),
        (QWEN_LIKE, {**A, "content": "", "reasoning_content": "Hm and"}, "<think>\nHm and"),
        (ALWAYS_OPEN, {**A, "content": "<think>\nHm and"}, "Hm and"),
        (ALWAYS_OPEN, {**A, "content": "Hm and"}, "Hm and"),
        (ALWAYS_OPEN, {**A, "content": "", "reasoning_content": "Hm and"}, "Hm and"),
        (DROPS_REASONING, {**A, "content": "", "reasoning_content": "Hm and"}, "Hm and"),
        (CHANNELS, {**A, "content": "", "reasoning_content": "Hm"}, "<|channel|>analysis<|message|>Hm"),
        (WRAPPED, A, "<|START_TEXT|>Hello"),
    ],
)
def test_an_answer_cut_by_a_length_limit_ends_there(template: str, message: Message, answer: str) -> None:
    assert [text for _, text in said(template, Q, message, finished=False)] == [answer]


@each("reasoning", ["\nHm\n", "Hm", "Hm\n"])
@each("content", ["\n\nHello", "Hello"])
def test_whitespace_at_the_seams_counts_once(reasoning: str, content: str) -> None:
    message = {"role": "assistant", "content": content, "reasoning": reasoning}
    assert said(QWEN_LIKE, Q, message) == [("assistant\n", f"<think>\nHm\n</think>\n\nHello{END}")]
    assert said(ALWAYS_OPEN, Q, message) == [("assistant\n<think>\n", f"Hm\n</think>\n\nHello{END}")]


def test_earlier_reasoning_is_in_no_later_prompt() -> None:
    chosen = tokenizer(QWEN_LIKE)
    encoder = ChatEncoder(chosen, chosen.convert_tokens_to_ids(list(STOPS)))
    rows = encoder.encode(Conversation(messages=(Q, THOUGHT, QUESTION_MORE, A), where="f:1"))
    assert ["Hm" in str(chosen.decode(row.ids)) for row in rows] == [True, False]


def test_a_prompt_is_what_a_server_would_feed() -> None:
    chosen = tokenizer(ALWAYS_OPEN)
    encoder = ChatEncoder(chosen, chosen.convert_tokens_to_ids(list(STOPS)))
    samples = encoder.samples(Conversation(messages=(Q, A, QUESTION_MORE, A), where="f:1"))
    for sample, before in zip(samples, ([Q], [Q, A, QUESTION_MORE]), strict=True):
        fed = chosen.apply_chat_template([dict(m) for m in before], add_generation_prompt=True, return_dict=False)
        assert list(sample.prompt_ids) == fed


def test_an_empty_answer_is_its_stop_token() -> None:
    for template in (CHATML, QWEN_LIKE, ALWAYS_OPEN, DROPS_REASONING):
        assert said(template, Q, {**A, "content": ""})[0][1] == END


def test_a_special_token_outside_the_stop_tokens_ends_the_answer() -> None:
    assert said(CHATML, Q, A, stops=("</s>",)) == [("assistant\n", f"Hello{END}")]


def test_arguments_of_the_record_override_those_of_the_run() -> None:
    chosen = tokenizer(QWEN_LIKE)
    encoder = ChatEncoder(chosen, [], variables={"enable_thinking": False})
    own = Conversation(messages=(Q, A), where="f:1", chat_template_kwargs={"enable_thinking": True})
    prompts = [encoder.samples(c)[0].prompt_ids for c in (own, Conversation(messages=(Q, A), where="f:2"))]
    assert ["</think>" in str(chosen.decode(prompt)) for prompt in prompts] == [False, True]


def test_an_argument_of_the_renderer_is_refused() -> None:
    conversation = Conversation(messages=(Q, A), where="f:1", chat_template_kwargs={"tokenize": True})
    with pytest.raises(UserError, match=r"f:1: .*'tokenize'"):
        ChatEncoder(tokenizer(CHATML), []).encode(conversation)


@each(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ none.x }}",
        "{{ 1 // 0 }}",
        "{% for x in messages.append(1) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
    ],
)
def test_errors_of_a_template_name_the_record(template: str) -> None:
    with pytest.raises(UserError, match=r"^f:1: the chat template refuses this conversation \(.+\)"):
        said(template, Q, CALL, RESULT, A)


def test_the_space_that_a_tokenizer_prepends_is_not_in_the_answer() -> None:
    vocab = {token: i for i, token in enumerate(["</s>", "▁", "▁Hi", "Hi", "▁you", "[", "]"])}
    backend = Tokenizer(models.BPE(vocab=vocab | {c: 7 + i for i, c in enumerate("HiyouXx")}, merges=[]))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_tokens([AddedToken("</s>", special=True, normalized=False)])
    template = "{% for m in messages %}[{{ m.content }}]{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    chosen = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, eos_token="</s>")
    encoder = ChatEncoder(chosen, [0])
    (sample,) = encoder.samples(Conversation(messages=(Q, {"role": "assistant", "content": "you"}), where="f:1"))
    assert "▁" not in chosen.convert_ids_to_tokens(list(sample.answer_ids))

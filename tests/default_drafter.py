"""A drafter for the default target, trained in two minutes on a CPU by the target's own answers to a few prompts.

It is no good drafter, but no random one either: it gets a part of its drafts accepted, so that the paths of a real
model are walked: whole drafts accepted, parts of them, none.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.config import DrafterConfig
from eyas.drafter.model import Drafter
from eyas.target.model import Target
from eyas.train.init import set_vocabulary
from tiny import unroll_loss

ANSWER_TOKENS = 64
DEPTHS = 3
PADDING = 0  # SmolLM2's end of text, which no answer holds

Lesson = tuple[Tensor, Tensor, Tensor]


def training_prompts() -> list[str]:
    """Prompts that are in no evaluation set."""
    return [
        "What is the capital of Italy?",
        "Explain in two sentences how a bicycle stays upright.",
        "Write a short poem about the sea at night.",
        "List five fruits that grow on trees.",
        "Translate 'good morning, my friend' into French.",
        "What does the Python function len do? Give an example.",
        "Write a Python function that adds two numbers.",
        "Why do leaves turn red in autumn?",
        "Tom has 12 marbles and gives 5 to Ann. How many are left?",
        "Give me three tips for sleeping better.",
        "Summarise the story of Little Red Riding Hood.",
        "What is the difference between a frog and a toad?",
        "Write an email asking a colleague for the meeting notes.",
        "Who wrote Romeo and Juliet, and when?",
        "Describe how to make a cup of tea, step by step.",
        "What is photosynthesis?",
        "Name the planets of the solar system in order.",
        "A train travels 60 miles in 2 hours. What is its speed?",
        "Write a sentence with the word 'lighthouse'.",
        "What are the benefits of regular exercise?",
        "Explain what a database index is.",
        "How do I write a loop in JavaScript?",
        "Invent a name for a bakery and say why it fits.",
        "What happened in the year 1969 on the Moon?",
    ]


def default_drafter_config(**changes: object) -> DrafterConfig:
    """Config of a drafter for the default target: EAGLE-3 unless `changes` set the flags of EAGLE-3.1."""
    base = DrafterConfig(
        vocab_size=49152,
        draft_vocab_size=4096,
        hidden_size=576,
        target_hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        aux_layer_ids=(2, 15, 27),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=8192,
        dtype="float32",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def train_default_drafter(target: Target, config: DrafterConfig, *, steps: int = 200) -> Drafter:
    """Train a drafter on the target's answers to `training_prompts`, one conversation a step.

    It shares the target's embeddings and has a head of its own, started from the target's rows. A pruned vocabulary
    holds the tokens of the training text, then those of the lowest ids, which byte-pair encoding gives to the
    commonest. The answers are computed once per process, so further drafters for the same target cost their steps
    only. Reproducible: seeded, and the caller's generator is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = Drafter(config)
        # Every conversation once, then every one again in another order, and so on.
        order = torch.cat([torch.randperm(len(training_prompts())) for _ in range(steps)])
    if config.pruned:
        set_vocabulary(drafter, _frequent_ids(target, config.draft_vocab_size))
    assert drafter.lm_head is not None
    drafter.lm_head.weight.data.copy_(target.head()[drafter.vocab().target_ids_W])
    drafter.norm.load_state_dict(target.model.model.norm.state_dict())
    drafter.share_target(target.embedding(), target.head())
    trainable = [p for p in drafter.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trainable, lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    lessons = _lessons(target, config.aux_layer_ids or target.facts.default_aux_layer_ids())
    for step in range(steps):
        optimiser.zero_grad()
        ids, logits, aux = lessons[int(order[step])]
        unroll_loss(drafter, ids, logits.float(), aux, DEPTHS).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimiser.step()
        schedule.step()
    return drafter.eval().requires_grad_(False)


@cache
@torch.no_grad()
def _conversations(target: Target) -> list[list[int]]:
    """Each prompt with the target's greedy answer to it, all answered in one batch."""
    prompts = [target.encode_chat([{"role": "user", "content": prompt}]) for prompt in training_prompts()]
    longest = max(map(len, prompts))
    # Padded on the left with the newest tokens aligned: what stands before a prompt is masked.
    ids_BT = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    generate: Any = target.model.generate
    output_BT = generate(
        ids_BT,
        attention_mask=mask_BT,
        do_sample=False,
        max_new_tokens=ANSWER_TOKENS,
        eos_token_id=sorted(target.stop_ids()),
        pad_token_id=PADDING,
    )
    answers = [[token for token in row if token != PADDING] for row in output_BT[:, longest:].tolist()]
    return [[*ids, *answer] for ids, answer in zip(prompts, answers, strict=True)]


@cache
def _lessons(target: Target, aux_layer_ids: tuple[int, ...]) -> list[Lesson]:
    """Ids, logits (in half precision: there are many) and auxiliary states of each conversation."""
    lessons = []
    for ids in _conversations(target):
        ids_BT = torch.tensor([ids])
        output = target.forward(ids_BT, aux_layer_ids)
        lessons.append((ids_BT, output.logits_BTV.half(), output.aux_hidden_BTX))
    return lessons


def _frequent_ids(target: Target, size: int) -> Tensor:
    seen = Counter(token for ids in _conversations(target) for token in ids)
    by_frequency = [token for token, _ in seen.most_common()]
    others = [token for token in range(target.facts.vocab_size) if token not in seen]
    return torch.tensor(sorted((by_frequency + others)[:size]))

"""Template arguments, other templates and plain text, from answers over a drafter to its examination."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from chat_tokenizer import chat_tokenizer, with_bos
from each import each
from eyas import LLM, SamplingParams
from eyas.cli.eval import _read_answer
from eyas.data.conversations import Conversation
from eyas.evaluate.prompts import Prompt
from eyas.serve.builders.answer_reader import AnswerReader
from eyas.target.model import Target
from eyas.target.text import load_tokenizer
from tiny import AUX_IDS, target_config

Run = Callable[..., Any]
THINKS = (
    "{{ bos_token }}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% set quick = '<think></think>' if enable_thinking is defined and not enable_thinking else '' %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ quick if m.role == 'assistant' }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ quick }}{% endif %}"
)
PROMPTS = ["Once upon a time", "The capital of France", "def mean(values):"]
QUICK = '{"enable_thinking": false}'


def save_model(folder: Path, template: str | None) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(target_config(vocab_size=264, max_position_embeddings=512)).save_pretrained(folder)
    tokenizer = with_bos(chat_tokenizer(template or "", bos="<s>"))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target without a chat template."""
    return save_model(tmp_path_factory.mktemp("models") / "base", None)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose template has a variable and tells of tools."""
    return save_model(tmp_path_factory.mktemp("models") / "thinker", THINKS)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return file


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    file = tmp_path / "answered.jsonl"
    rows = [[{"role": "user", "content": text}, {"role": "assistant", "content": " and so on."}] for text in PROMPTS]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


def recipe(target: Path, file: Path, folder: Path, **keys: object) -> Path:
    own = "".join(f"{key} = {value}\n" for key, value in keys.items())
    path = folder / "recipe.toml"
    path.write_text(
        f'[target]\nsource = "{target}"\n{own}[data]\nfiles = ["{file}"]\nworkers = 1\n'
        "held_out_share = 0\nmax_length = 256\n"
        f"[drafter]\naux_layer_ids = {list(AUX_IDS)}\n"
        f'[train]\nsteps = 2\ndepths = 2\n[output]\nfolder = "{folder / "run"}"\n'
    )
    return path


def shown(run: Run, file: Path, target: Path, *more: object) -> str:
    """The first conversation as training sees it."""
    outcome = run("data", "show", file, "--target", target, "--json", *more)
    assert outcome.code == 0, outcome
    (row,) = json.loads(outcome.out)["sample"]
    return str(load_tokenizer(str(target))[0].decode(row["ids"]))


@pytest.mark.slow
def test_a_base_model_goes_from_training_to_its_examination(
    run: Run, base: Path, asked: Path, answered: Path, tmp_path: Path
) -> None:
    assert shown(run, answered, base, "--raw") == "<s>Once upon a time and so on.</s>"
    made = tmp_path / "made.jsonl"
    told = run("data", "answer", asked, "--target", base, "--raw", "--max-tokens", 12, "--out", made, "--device", "cpu")
    assert told.code == 0, told
    tokenizer, _ = load_tokenizer(str(base))
    samples = [json.loads(line)["samples"][0] for line in made.read_text().splitlines()]
    prompts = sorted(sample["prompt_token_ids"] for sample in samples)
    assert prompts == sorted(tokenizer.encode(text) for text in PROMPTS)
    trained = run("train", recipe(base, made, tmp_path, raw="true"))
    assert trained.code == 0, trained
    again = run("train", tmp_path / "recipe.toml", "--resume", "--set", "target.chat_template_kwargs.pace=1")
    assert again.code == 2
    assert "had target.chat_template_kwargs = {} and now it is {'pace': 1}" in again.err
    drafter = tmp_path / "run" / "drafter"
    options = ["--target", base, "--drafter", drafter, "--max-tokens", 8, "--raw", "--stop", "q", "--device", "cpu"]
    measured = run("eval", asked, *options, "--depth", 2, "--json")
    assert measured.code == 0, measured
    (group,) = json.loads(measured.out)["groups"]
    assert [one["tokens"] for one in group["asked"]] == [1 + len(text) for text in PROMPTS]  # a BOS before each
    options += [asked, "--depth", 3, "--case-prompts", 1, "--length", 60, "--no-diagnosis"]
    examined = run("doctor", *options, "--json")
    assert examined.code == 0, examined
    cases = {case["name"]: case for case in json.loads(examined.out)["cases"]}
    assert cases["no template"]["left_out"]
    assert cases["ChatML template"]["prompts"] == cases["no BOS"]["prompts"] == 1


def test_plain_text_is_what_the_tokenizer_makes_of_it(base: Path) -> None:
    llm = LLM(str(base), drafter="none", device="cpu", raw=True, max_model_len=64, max_num_seqs=2)
    params = SamplingParams(max_tokens=4)
    assert llm.chat(PROMPTS[0], params)[0].tokens == llm.generate(PROMPTS[0], params)[0].tokens


@pytest.mark.parametrize("command", ["eval", "doctor", "generate", "show", "train"])
def test_without_a_template_the_ways_out_are_named(
    run: Run, base: Path, asked: Path, answered: Path, tmp_path: Path, save: Callable[..., Path], command: str
) -> None:
    drafter = save(vocab_size=264, draft_vocab_size=264)
    arguments = {
        "eval": ["eval", asked, "--target", base, "--drafter", drafter],
        "doctor": ["doctor", asked, "--target", base, "--drafter", drafter],
        "generate": ["generate", "Hi", "--target", base],
        "show": ["data", "show", answered, "--target", base],
        "train": ["train", recipe(base, answered, tmp_path)],
    }[command]
    outcome = run(*arguments)
    assert outcome.code == 2
    assert "has no chat template" in outcome.err
    assert "--raw" in outcome.err
    assert "--chat-template FILE" in outcome.err


def test_arguments_of_the_run_stand_below_those_of_a_record(
    run: Run, thinker: Path, answered: Path, tmp_path: Path
) -> None:
    plain, quick = shown(run, answered, thinker), shown(run, answered, thinker, "--chat-template-kwargs", QUICK)
    assert "<think>" not in plain
    assert "assistant\n<think></think> and so on." in quick
    row = json.loads(answered.read_text().splitlines()[0])
    tool = {"type": "function", "function": {"name": "look"}}
    answered.write_text(json.dumps({**row, "chat_template_kwargs": {"enable_thinking": True}, "tools": [tool]}))
    own = shown(run, answered, thinker, "--chat-template-kwargs", QUICK)
    assert "<think>" not in own
    assert own.startswith("<s>[look]<|im_start|>user")


def test_answers_are_given_and_kept_with_the_arguments_of_the_run(
    run: Run, thinker: Path, asked: Path, tmp_path: Path
) -> None:
    options = ["--target", thinker, "--max-tokens", 12, "--device", "cpu", "--chat-template-kwargs", QUICK]
    outcome = run("data", "answer", asked, *options, "--out", tmp_path / "made.jsonl")
    assert outcome.code == 0, outcome
    rows = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert {json.dumps(row["chat_template_kwargs"]) for row in rows} == {QUICK}
    tokenizer, _ = load_tokenizer(str(thinker))
    for row in rows:
        assert tokenizer.decode(row["samples"][0]["prompt_token_ids"]).endswith("assistant\n<think></think>")


def test_a_stop_text_ends_an_answer_that_is_kept_with_it(run: Run, base: Path, asked: Path, tmp_path: Path) -> None:
    def rows(name: str, *more: object) -> dict[int, dict[str, Any]]:
        options = ["--target", base, "--raw", "--max-tokens", 24, "--device", "cpu", "--out", tmp_path / name]
        assert run("data", "answer", asked, *options, *more).code == 0
        return {row["id"]: row for row in map(json.loads, (tmp_path / name).read_text().splitlines())}

    whole = rows("whole.jsonl")
    text = str(whole[0]["messages"][-1]["content"])
    stop = next(sign for sign in text[2:] if sign.isascii())
    stopped = rows("stopped.jsonl", "--stop", stop)[0]
    kept, all_of = stopped["samples"][0]["token_ids"], whole[0]["samples"][0]["token_ids"]
    tokenizer, _ = load_tokenizer(str(base))
    assert stopped["finished"]
    assert stopped["messages"][-1]["content"] == text[: text.index(stop)]
    assert kept == all_of[: len(kept)]
    assert tokenizer.decode(kept).endswith(stop)


@pytest.mark.slow
def test_arguments_of_the_recipe_reach_the_encoding_and_are_part_of_its_key(
    run: Run, thinker: Path, answered: Path, tmp_path: Path
) -> None:
    made = []
    for keys in ({}, {"chat_template_kwargs": "{ enable_thinking = false }"}):
        path = recipe(thinker, answered, tmp_path, **keys)
        assert run("train", path, "--set", f"output.folder={tmp_path / f'run{len(made)}'}").code == 0
        made.append(json.loads((tmp_path / f"run{len(made)}" / "record.json").read_text())["data"]["tokens"])
    assert made[1] == made[0] + len(PROMPTS) * len("<think></think>")


def test_another_template_writes_conversations(run: Run, thinker: Path, answered: Path, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}")
    template.write_text(template.read_text() + "{% if add_generation_prompt %}a:{% endif %}")
    assert shown(run, answered, thinker, "--chat-template", template) == "u:Once upon a time</s>a: and so on.</s>"
    outcome = run("train", recipe(thinker, answered, tmp_path, chat_template=f'"{tmp_path / "none.jinja"}"'))
    assert outcome.code == 2
    assert f"target.chat_template {tmp_path / 'none.jinja'} cannot be read" in outcome.err


@each(
    ("options", "parts"),
    [
        (["--chat-template-kwargs", "{"], ["--chat-template-kwargs", "not JSON"]),
        (["--chat-template-kwargs", "[1]"], ["no object", "enable_thinking"]),
        (["--chat-template-kwargs", '{"tools": []}'], ["'tools'", "not the template's to choose"]),
        (["--chat-template", "nowhere.jinja"], ["nowhere.jinja", "cannot be read"]),
        (["--raw", "--chat-template", "{{ messages }}"], ["--raw and --chat-template", "give one"]),
        (["--stop", ""], ["--stop is empty"]),
    ],
)
def test_what_cannot_be_meant_is_refused(run: Run, thinker: Path, options: list[str], parts: list[str]) -> None:
    outcome = run("generate", "Hi", "--target", thinker, *options)
    assert outcome.code == 2
    for part in parts:
        assert part in outcome.err, outcome


def test_a_stop_text_ends_an_answer(run: Run, base: Path) -> None:
    words = ["generate", "Once", "--target", base, "--raw", "--max-tokens", 24, "--json", "--device", "cpu"]
    whole = json.loads(run(*words).out)["answer"]
    stop = next(sign for sign in whole[2:] if sign.isascii())
    assert json.loads(run(*words, "--stop", stop).out)["answer"] == whole[: whole.index(stop)]


def test_a_next_turn_of_an_evaluation_sees_what_a_client_would_send_back() -> None:
    template = "<think></think>{{ m.reasoning_content }}"
    reader = AnswerReader(cast(Target, SimpleNamespace(tokenizer=chat_tokenizer(template))))
    asked = Conversation(messages=({"role": "user", "content": "Hi"},), where="a:1")
    prompt = Prompt(key=0, ids=(1, 2), category="", turn=0, conversation=asked)
    assert _read_answer(reader, prompt, "<think>Hm</think>Ho") == {
        "role": "assistant",
        "content": "Ho",
        "reasoning_content": "Hm",
    }


def named(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = {"default": THINKS, "tool_use": "{{ messages[0].content }} with tools"}


def test_named_templates_without_a_default_are_refused_by_name(run: Run, asked: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "rag", None)
    tokenizer = with_bos(chat_tokenizer("", bos="<s>"))
    tokenizer.chat_template = {"rag": THINKS, "tool_use": THINKS}
    tokenizer.save_pretrained(folder)
    outcome = run("data", "answer", asked, "--target", folder, "--out", tmp_path / "made.jsonl", "--device", "cpu")
    assert outcome.code == 2
    assert "templates named rag, tool_use and none of them is the default" in outcome.err
    target = Target.load(str(folder))
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert target.encode_chat([{"role": "user", "content": "Hi"}], [tool])


def test_templates_in_a_file_of_their_own_and_named_ones_are_read(base: Path, tmp_path: Path) -> None:
    """As transformers writes them today (files), and as older folders hold them (in the tokenizer's config)."""
    messages = [{"role": "user", "content": "Hi"}]
    for name, legacy in (("files", False), ("config", True)):
        folder = tmp_path / name
        LlamaForCausalLM(target_config(vocab_size=264)).save_pretrained(folder)
        tokenizer = with_bos(chat_tokenizer("", bos="<s>"))
        named(tokenizer)
        tokenizer.save_pretrained(folder, save_jinja_files=not legacy)
        assert (folder / "chat_template.jinja").exists() != legacy
        target = Target.load(str(folder))
        assert "<|im_start|>assistant" in target.decode(target.encode_chat(messages), skip_special_tokens=False)
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        assert target.decode(target.encode_chat(messages, [tool])) == "Hi with tools"

"""The drafter here is the drafter vLLM runs: same states in, same tokens out, proposal by proposal.

Each case trains a drafter, lets the real vLLM serve it (record.py, a process of its own) and replays every proposal
on states of our own making. Output equality would prove little: a wrong drafter still gives the right text, slower.
Figures are printed as a table and written to build/parity.json.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny
from default_drafter import default_drafter_config, train_default_drafter, training_prompts
from eyas.drafter.check import check
from eyas.drafter.checkpoint import checkpoint_of, load_drafter, read_checkpoint, write_checkpoint
from eyas.drafter.config import DrafterConfig
from eyas.drafter.layer_json import NORM_FLAGS
from eyas.drafter.layouts import name_verifier
from eyas.drafter.model import Drafter
from eyas.drafter.shipped import DEFAULT_DRAFTER
from eyas.target.facts import facts_of
from eyas.target.locate import locate
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.reference import Chain, TargetModel, decode_plainly, decode_speculatively
from oracle.rejection import SeededDraws
from parity.compare import agreement, flipped, relative_difference
from parity.eagle1_faults import norm_before_attention, norm_before_head, state_before_embedding, state_before_last_norm
from published_eagle1 import publish

pytestmark = pytest.mark.parity

DEPTH = 5
TargetKind = Literal["plain", "latent", "loud"]
EAGLE_31 = {"fc_norm": True, "norm_output": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A drafter to train and the format to export it in."""

    flags: dict[str, Any]
    layout: str = "vllm"
    on_default_target: bool = False
    latent: bool = False
    """Whether target and drafter have latent attention (MLA)."""
    eagle1: bool = False
    published: bool = False
    """Whether vLLM is given what EAGLE's authors publish, which eyas did not write."""
    shipped: str | None = None
    """The name of a drafter that comes with eyas; it is not trained here."""

    @property
    def target(self) -> TargetKind:
        """EAGLE-1 reads states behind the last norm, which must not be near the identity to tell."""
        return "latent" if self.latent else "loud" if self.eagle1 else "plain"


CASES = {
    "EAGLE-3": Case(flags={}),
    "EAGLE-3.1": Case(flags=EAGLE_31),
    "EAGLE-3.1, sglang format": Case(flags=EAGLE_31, layout="sglang"),
    "EAGLE-3.1, speculators format": Case(flags=EAGLE_31, layout="speculators"),
    "norm_before_fc + norm_output": Case(flags={"norm_before_fc": True, "norm_output": True}),
    "norm_before_residual": Case(flags={"norm_before_residual": True}),
    "pruned vocabulary": Case(flags={**EAGLE_31, "draft_vocab_size": 64}),
    "two layers": Case(flags={**EAGLE_31, "num_hidden_layers": 2}),
    "narrow, biases, yarn, two states": Case(
        flags={
            **EAGLE_31,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "num_aux_hidden_states": 2,
            "aux_layer_ids": (1, 4),
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        }
    ),
    "Qwen3 layers": Case(flags={**EAGLE_31, "qk_norm": True}),
    "Qwen3 layers, speculators format": Case(flags={**EAGLE_31, "qk_norm": True}, layout="speculators"),
    "Qwen3, two layers": Case(flags={**EAGLE_31, "qk_norm": True, "num_hidden_layers": 2}),
    "MLA": Case(flags=EAGLE_31, latent=True),
    "MLA, sglang format": Case(flags=EAGLE_31, latent=True, layout="sglang"),
    "EAGLE-1": Case(flags={}, eagle1=True),
    "EAGLE-1, as published": Case(flags={}, eagle1=True, published=True),
    "EAGLE-1, two layers, biases": Case(flags={"num_hidden_layers": 2, "attention_bias": True}, eagle1=True),
    "default target, EAGLE-3": Case(flags={}, on_default_target=True),
    "default target, EAGLE-3.1": Case(flags=EAGLE_31, on_default_target=True),
    "shipped, EAGLE-3.1": Case(flags=EAGLE_31, on_default_target=True, shipped=DEFAULT_DRAFTER["smollm2"]),
}


def _must_matter(name: str, flag: str) -> bool:
    """Whether flipping this flag against what the drafter was trained with has to break parity. The table shows all."""
    case = CASES[name]
    if case.eagle1:
        return False  # it has none of these norms; what it could be taken for instead is in `FAULTS`
    if case.latent and flag == "norm_before_fc":
        return False  # there is none beside latent attention
    if case.shipped is not None:
        return False  # its norms are what training made of them; the table shows what they do
    if case.layout != "vllm":
        return False  # the same drafter again
    if flag == "norm_before_fc" and case.flags.get("fc_norm"):
        return False  # scaling all states alike in front of a norm on each: it cancels
    if case.flags.get("norm_before_residual") and flag != "norm_before_residual":
        return False  # the state is read through hidden_norm alone, which undoes any change of size
    # A norm with unit weights on a state that is of about unit size already, measured: it changes little.
    return (name, flag) not in {
        ("EAGLE-3", "norm_output"),
        ("norm_before_fc + norm_output", "fc_norm"),
        ("default target, EAGLE-3.1", "norm_before_residual"),
    }


CONTROLS = [(name, flag) for name in CASES for flag in NORM_FLAGS if _must_matter(name, flag)]
FAULTS = {
    "state before the last norm": state_before_last_norm,
    "norm before attention": norm_before_attention,
    "norm before the head": norm_before_head,
    "state before embedding": state_before_embedding,
}
CONTROLS += [(name, "qk_norm") for name, case in CASES.items() if case.flags.get("qk_norm") and case.layout == "vllm"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A trained drafter, what vLLM did with it, and our target to repeat it with."""

    drafter: Drafter
    folder: Path
    target: TargetModel
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    record: dict[str, Any]
    their_aux: Sequence[Tensor]
    our_aux: Sequence[Tensor]


@dataclass
class Laboratory:
    """Trains and records each case once."""

    folder: Path
    results: dict[str, Result] = field(default_factory=dict)
    drafters: dict[str, Drafter] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    tiny_targets: dict[TargetKind, Any] = field(default_factory=dict)
    default_target: Target | None = None

    def result(self, name: str) -> Result:
        if name not in self.results:
            self.results[name] = self._run(name, CASES[name])
        return self.results[name]

    def tiny_target_folder(self, kind: TargetKind = "plain") -> Path:
        folder = self.folder / f"{kind}-target"
        if kind not in self.tiny_targets:
            model = tiny.trained_target(config=tiny.latent_target_config() if kind == "latent" else None)
            if kind == "loud":
                model = tiny.with_loud_norm(model)
            model.save_pretrained(folder)
            self.tiny_targets[kind] = model
        return folder

    def flipped_shares(self, name: str) -> dict[str, float]:
        """The share of proposals still equal with each flag flipped: all are shown, those that must matter asserted."""
        if "flipped" not in self.figures.get(name, {}):
            result = self.result(name)
            shares = {
                flag: agreement(flipped(result.drafter, flag), result.record, result.our_aux, DEPTH).share
                for flag in (*NORM_FLAGS, *(("qk_norm",) if result.drafter.config.qk_norm else ()))
                if flag != "norm_before_fc" or result.drafter.config.mla is None
            }
            self.note(name, flipped=shares)
        return dict(self.figures[name]["flipped"])

    def note(self, name: str, **figures: object) -> None:
        self.figures.setdefault(name, {}).update(figures)

    def _run(self, name: str, case: Case) -> Result:
        target_folder, target, prompts, new_tokens, train = self._stage(case)
        key = json.dumps([case.flags, case.on_default_target, case.shipped, case.latent, case.eagle1], default=list)
        if key not in self.drafters:
            self.drafters[key] = train()
        drafter = self.drafters[key]
        folder = self.folder / name.replace(" ", "-").replace(",", "")
        if case.published:
            embedding_VD = self.tiny_targets[case.target].get_input_embeddings().weight
            publish(drafter, embedding_VD, folder / "drafter")
        else:
            write_checkpoint(checkpoint_of(drafter), folder / "drafter", layout=case.layout)
        job = {
            "target": str(target_folder),
            "drafter": str(folder / "drafter"),
            "depth": DEPTH,
            "new_tokens": new_tokens,
            "max_model_len": 400,
            "latent": case.latent,
            "method": drafter.config.method,
            "prompts": prompts,
        }
        job_file = folder / "job.json"
        job_file.write_text(json.dumps(job))
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("record.py")), str(job_file)],
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        record = json.loads(job_file.with_suffix(".record.json").read_text())
        aux = load_file(job_file.with_suffix(".record.safetensors"))
        sequences = [[*prompt, *output] for prompt, output in zip(prompts, record["outputs"], strict=True)]
        return Result(
            drafter=drafter,
            folder=folder / "drafter",
            target=target,
            prompts=prompts,
            new_tokens=new_tokens,
            record=record,
            their_aux=[aux[f"aux.{i}"] for i in range(len(prompts))],
            our_aux=[target([ids])[0][1] for ids in sequences],
        )

    def _stage(self, case: Case) -> tuple[Path, TargetModel, list[list[int]], int, Callable[[], Drafter]]:
        if case.on_default_target:
            if self.default_target is None:
                self.default_target = Target.load("smollm2", dtype="float32")
            target = self.default_target
            shipped = None if case.shipped is None else load_drafter(case.shipped).float()
            config = default_drafter_config(**case.flags) if shipped is None else shipped.config
            prompts = [target.encode_chat([{"role": "user", "content": text}]) for text in training_prompts()[:6]]
            return (
                Path(locate("smollm2")),
                DenseTarget(target, config),
                prompts,
                40,
                lambda: (
                    train_default_drafter(target, config)
                    if shipped is None
                    else shipped.share_target(target.embedding(), target.head())
                ),
            )
        folder = self.tiny_target_folder(case.target)
        model = self.tiny_targets[case.target]
        make = tiny.latent_drafter_config if case.latent else tiny.drafter_config
        config = (tiny.eagle1_config if case.eagle1 else make)(**case.flags)
        generator = torch.Generator().manual_seed(9)
        prompts = tiny.language(24, 12, generator).tolist()
        kept = torch.randperm(tiny.VOCAB, generator=generator)[: config.draft_vocab_size].sort().values
        return (
            folder,
            _tiny_target_model(model, config),
            prompts,
            16,
            lambda: tiny.trained_drafter(model, config, steps=120, kept=kept if config.pruned else None),
        )


def _tiny_target_model(model: Any, config: DrafterConfig) -> TargetModel:
    def run(sequences: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        layer_ids = config.layers_read(facts_of(model.config, "tiny"))
        outputs = [tiny.features(model, torch.tensor([list(ids)]), layer_ids) for ids in sequences]
        return [(logits[0], aux[0]) for logits, aux in outputs]

    return run


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    laboratory = Laboratory(folder=tmp_path_factory.mktemp("parity"))
    yield laboratory
    out = Path("build/parity.json")
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"depth": DEPTH, "cases": laboratory.figures}, indent=2) + "\n")
    print(f"\n\n{'case':36} {'proposals equal':>16} {'aux error':>10} {'length ours':>12} {'vLLM':>6}  flags flipped")
    for name, row in laboratory.figures.items():
        flips = ", ".join(f"{flag} {share:.0%}" for flag, share in row.get("flipped", {}).items())
        equal = f"{row['equal']} of {row['comparable']}" if "equal" in row else "-"
        print(
            f"{name:36} {equal:>16} {row.get('aux_error', float('nan')):10.1e} "
            f"{row.get('our_length', float('nan')):12.3f} {row.get('vllm_length', float('nan')):6.3f}  {flips}"
        )
    print(f"written to {out}")


@pytest.mark.parametrize("name", CASES)
def test_auxiliary_states_are_those_vllm_feeds_its_drafter(lab: Laboratory, name: str) -> None:
    result = lab.result(name)
    errors = []
    for ours, theirs in zip(result.our_aux, result.their_aux, strict=True):
        if result.drafter.config.eagle1:
            ours = result.drafter.fuse(ours)
        slots = min(len(ours), len(theirs))
        width = result.drafter.config.target_hidden_size
        errors += [
            relative_difference(a, b)
            for a, b in zip(ours[:slots].split(width, dim=-1), theirs[:slots].split(width, dim=-1), strict=True)
        ]
    lab.note(name, aux_error=max(errors))
    assert max(errors) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_draft_tokens_equal_vllm_proposal_by_proposal(lab: Laboratory, name: str) -> None:
    result = lab.result(name)
    found = agreement(result.drafter, result.record, result.our_aux, DEPTH)
    lab.note(name, **asdict(found))
    assert found.comparable >= 20
    assert found.share >= 0.99


@pytest.mark.parametrize(("name", "flag"), CONTROLS)
def test_flipping_a_norm_flag_breaks_parity(lab: Laboratory, name: str, flag: str) -> None:
    assert lab.flipped_shares(name)[flag] < 0.3


@pytest.mark.parametrize("fault", FAULTS)
def test_an_eagle1_drafter_computed_otherwise_breaks_parity(lab: Laboratory, fault: str) -> None:
    name = "EAGLE-1"
    result = lab.result(name)
    share = agreement(FAULTS[fault](result.drafter), result.record, result.our_aux, DEPTH).share
    lab.note(name, flipped={**lab.figures.get(name, {}).get("flipped", {}), fault: share})
    assert share < 0.3


def test_vllm_drafts_the_same_from_the_published_files_and_from_ours(lab: Laboratory, tmp_path: Path) -> None:
    published, ours = (lab.result(name) for name in ("EAGLE-1, as published", "EAGLE-1"))
    assert published.record["proposals"] == ours.record["proposals"]
    write_checkpoint(read_checkpoint(str(published.folder)), tmp_path / "converted")
    converted, written = (read_checkpoint(str(folder)) for folder in (tmp_path / "converted", ours.folder))
    assert converted.config == written.config
    assert all(torch.equal(converted.tensors[name], tensor) for name, tensor in written.tensors.items())


@pytest.mark.parametrize("name", CASES)
def test_acceptance_counts_equal_vllm(lab: Laboratory, name: str) -> None:
    result = lab.result(name)
    rounds = []
    for prompt, output in zip(result.prompts, result.record["outputs"], strict=True):
        ours = decode_speculatively(
            result.target,
            EagleDraft(result.drafter),
            prompt,
            shape=Chain(depth=DEPTH),
            draws=SeededDraws(0),
            max_new_tokens=result.new_tokens,
        )
        assert list(ours.tokens) == output, "greedy text differs"
        rounds += ours.rounds
    counters = result.record["counters"]
    accepted_at = [sum(r.accepted > position for r in rounds) for position in range(DEPTH)]
    lab.note(
        name,
        our_length=1 + sum(r.accepted for r in rounds) / len(rounds),
        vllm_length=1 + counters["num_accepted_tokens"] / counters["num_drafts"],
        our_accepted_at=accepted_at,
        vllm_accepted_at=counters["num_accepted_tokens_per_pos"],
    )
    assert counters["num_drafts"] == len(rounds)
    assert counters["num_accepted_tokens_per_pos"] == accepted_at


def test_vllm_drafts_the_same_from_all_three_exports(lab: Laboratory) -> None:
    records = [
        lab.result(name).record["proposals"]
        for name in ("EAGLE-3.1", "EAGLE-3.1, sglang format", "EAGLE-3.1, speculators format")
    ]
    assert records[0] == records[1] == records[2]


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if not case.on_default_target and not case.published]
)
def test_checked_drafters_have_no_findings(lab: Laboratory, name: str) -> None:
    result = lab.result(name)
    report = check(str(result.folder), target=facts_of(tiny.target_config(), "tiny"))
    assert report.ok
    assert not report.findings


@pytest.mark.parametrize(
    "flags",
    [
        {},
        EAGLE_31,
        {"norm_before_fc": True, "norm_output": True},
        {**EAGLE_31, "draft_vocab_size": 64, "num_hidden_layers": 2},
    ],
    ids=["EAGLE-3", "EAGLE-3.1", "norm_before_fc", "pruned, two layers"],
)
def test_the_speculators_library_loads_ours(lab: Laboratory, tmp_path: Path, flags: dict[str, Any]) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel

    drafter = tiny.random_drafter(tiny.drafter_config(**flags))
    checkpoint = checkpoint_of(drafter)
    named = replace(checkpoint, extras=name_verifier(checkpoint.extras, str(lab.tiny_target_folder())))
    write_checkpoint(named, tmp_path / "drafter", layout="speculators")
    theirs = Eagle3DraftModel.from_pretrained(str(tmp_path / "drafter"))
    state = theirs.state_dict()
    from_target = {"embed_tokens.weight"}  # the library shares the target's, whatever is shipped
    for name, ours in checkpoint.tensors.items():
        assert name in from_target or torch.equal(state[name].to(ours.dtype), ours), name
    assert theirs.config.fc_norm == drafter.config.fc_norm
    assert theirs.config.norm_output == drafter.config.norm_output
    assert theirs.target_layer_ids == list(tiny.AUX_IDS)


def test_plain_decoding_is_what_vllm_puts_out(lab: Laboratory) -> None:
    result = lab.result("EAGLE-3.1")
    for prompt, output in list(zip(result.prompts, result.record["outputs"], strict=True))[:6]:
        plain = decode_plainly(result.target, prompt, draws=SeededDraws(0), max_new_tokens=result.new_tokens)
        assert list(plain) == output

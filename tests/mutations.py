"""Faults planted one by one into a copy of the tree: `make test` has to catch each of them. `make mutations` runs this.

A mutation names a file below src/eyas, some text in it, what stands there instead, the law that this breaks, and tests
that probably notice. Those run first; the whole fast tier runs where they do not. A mutation that nothing catches, or
whose text is not in its file exactly once, is an error.

    python tests/mutations.py [part of a name ...]
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    """A planted fault."""

    law: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "top-k keeps k tokens, not k + 1",
        "engine/runner/slot_sampling.py",
        "kth_R11 = top_k_R11.clamp(1, head) - 1", "kth_R11 = (top_k_R11 + 1).clamp(1, head) - 1",
        "engine/test_slot_sampling.py",
    ),
    Mutation(
        "the rank of the most likely token is 1",
        "engine/logprobs.py", "rank_N = 1 + (", "rank_N = (",
        "engine/test_sampler.py",
    ),
    Mutation(
        "noise is a function of the position: two drafts share none",
        "kernels/noise.py", "+ position_N * _GOLDEN)", "+ position_N // 2 * _GOLDEN)",
        "kernels/test_noise.py",
    ),
    Mutation(
        "a draft behind another has noise of its own",
        "engine/runner/slot_sampling.py",
        "position_R[:, None] + (self._index_V[:width] if", "position_R[:, None] + (0 * self._index_V[:width] if",
        "engine/test_slot_sampling.py engine/test_engine.py",
    ),
    Mutation(
        "penalties count a draft once",
        "engine/runner/slot_sampling.py",
        "before_RQK.to(counts_RQV.dtype))", "2 * before_RQK.to(counts_RQV.dtype))",
        "engine/test_slot_sampling.py engine/test_token_options.py",
    ),
    Mutation(
        "a draft is accepted if it is the target's own token",
        "kernels/rounds.c",
        "token[accepted] == drafts[accepted]) accepted",
        "(token[accepted] == drafts[accepted] || accepted == 2)) accepted",
        "kernels/test_exact_rounds.py engine/test_engine.py",
    ),
    Mutation(
        "threads that share work leave no piece undone",
        "kernels/threads.c", "some(work, first, first + size);", "some(work, first, first + size - (first > 0));",
        "kernels/test_threads.py",
    ),
    Mutation(
        "a shared block is free when its last owner lets go",
        "engine/kv_cache/block_manager.py",
        "            if self._references[block] == 0:\n                prefix",
        "            if self._references[block] <= 1:\n                prefix",
        "engine/test_block_manager.py",
    ),
    Mutation(
        "blocks are found under their salt alone",
        "engine/kv_cache/block_manager.py",
        "before: _Prefix | str | None = cache_salt", "before: _Prefix | str | None = None",
        "engine/test_scheduler.py",
    ),
    Mutation(
        "a preempted request owns no block",
        "engine/scheduler.py",
        "seq.blocks, seq.slot, seq.flights = [], None, []", "seq.slot, seq.flights = None, []",
        "engine/test_scheduler.py",
    ),
    Mutation(
        "no draft goes beyond the last token that an answer may have",
        "engine/scheduler.py", "seq.limit - fewest - 1) for seq", "seq.limit - fewest) for seq",
        "engine/test_scheduler.py",
    ),
    Mutation(
        "a token sees none behind it",
        "kernels/attention/dense.py", "dtype=torch.bool).tril()\n    slot_S", "dtype=torch.bool).tril(1)\n    slot_S",
        "kernels/test_attention.py",
    ),
    Mutation(
        "the token with the stop string is part of the answer",
        "engine/output.py", "return texts, FinishReason.STOP", "return texts[:-1], FinishReason.STOP",
        "serve/test_answers.py",
    ),
    Mutation(
        "half a character is held back",
        "engine/detokenizer.py", "if text.endswith(UNFINISHED) or len(text)", "if len(text)",
        "engine/test_detokenizer.py",
    ),
    Mutation(
        "a grammar's mask is that behind the last draft",
        "grammar/llguidance.py", "path = tuple(drafts)\n", "path = tuple(drafts[:-1])\n",
        "engine/test_grammar.py",
    ),
    Mutation(
        "with norm_output the next depth gets the state behind the norm",
        "drafter/model.py", "feedback=normed if self.config.norm_output else hidden", "feedback=hidden",
        "drafter/test_model.py",
    ),
    Mutation(
        "with fc_norm each of the target's states is normed",
        "drafter/model.py", "if self.fc_norm is not None:", "if self.fc_norm is not None and self.training:",
        "drafter/test_model.py",
    ),
    Mutation(
        "d2t is an offset from the draft id",
        "drafter/vocab.py", "cls(d2t_W + torch.arange(len(d2t_W)", "cls(d2t_W + torch.arange(1, 1 + len(d2t_W)",
        "drafter/test_vocab.py",
    ),
    Mutation(
        "int8 weights are scaled by their largest over 127",
        "kernels/linear/quantised_weight.py",
        "INT8_LARGEST\n    q_EK = (weight_EK / scale_E1).round()",
        "(INT8_LARGEST + 1)\n    q_EK = (weight_EK / scale_E1).round()",
        "quantization kernels/test_quantised_linears.py drafter/test_quantised_linears.py",
    ),
    Mutation(
        "depth k of training stands k positions behind depth 0",
        "train/unroll.py", "batch.position_T[slot_N] + depth", "batch.position_T[slot_N]",
        "train/test_unroll.py",
    ),
    Mutation(
        "a prediction counts at the token whose next one is part of the answer",
        "train/batch.py", "np.nonzero(counted[:-1] & counted[1:])[0]", "np.nonzero(counted[:-1] & counted[1:])[0] + 1",
        "train/test_unroll.py train/test_slots.py",
    ),
    Mutation(
        "each chunk of a stream is sent once",
        "serve/builders/response_builder.py",
        "            yield self._counted(chunk, choice.tokens)",
        "            yield from 2 * [self._counted(chunk, choice.tokens)]",
        "serve/test_answers.py",
    ),
    Mutation(
        "usage counts tokens, not pieces",
        "serve/builders/response_builder.py", "made = sum(choice.tokens for", "made = sum(len(choice.deltas) for",
        "serve/test_answers.py",
    ),
    Mutation(
        "a request without a known key is refused where keys are set",
        "serve/access/auth.py", "if self._needs_key and caller.key_digest is None", "if self._needs_key and not scope",
        "serve/test_access.py serve/test_operation.py",
    ),
    Mutation(
        "callers with other keys share no cached prefix",
        "serve/access/caller.py", "{self.key_digest or ''}/{given or ''}", "{given or ''}",
        "serve/test_access.py",
    ),
)  # fmt: skip


def pytest_in(tree: Path, *arguments: str) -> str:
    """The first failing test in a copy of the tree; empty if all pass."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "--durations=1", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ")) and "::" in line]
    if done.returncode and not failed:
        sys.exit(f"pytest could not run in the copy: {done.stdout}{done.stderr}")
    return failed[0].split(" - ")[0].split(" ", 1)[1] if failed else ""


def caught_by(mutation: Mutation, tree: Path) -> str:
    """The first test that catches a mutation; empty if none does."""
    path = tree / "src" / "eyas" / mutation.file
    text = path.read_text(encoding="utf-8")
    found = text.count(mutation.old)
    if found != 1:
        sys.exit(
            f"{mutation.file} has {found} times what mutation {mutation.law!r} replaces; correct tests/mutations.py"
        )
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        likely = [str(Path("tests") / name) for name in mutation.tests.split()]
        return pytest_in(tree, *likely) or pytest_in(tree, "--numprocesses", "2", "--dist", "loadfile")
    finally:
        path.write_text(text, encoding="utf-8")


def main(wanted: list[str]) -> int:
    """Plant all mutations whose law or file contains one of these words; all without words."""
    chosen = [one for one in MUTATIONS if not wanted or any(word in f"{one.law} {one.file}" for word in wanted)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "eyas"
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=ignored)
        kept = ROOT / ".pytest_cache"
        kept.mkdir(exist_ok=True)
        (tree / ".pytest_cache").symlink_to(kept)  # trained models and compiled kernels, all by their sources
        for mutation in chosen:
            test = caught_by(mutation, tree)
            missed += not test
            print(f"{'caught' if test else 'NOT CAUGHT'}  {mutation.law}\n        {mutation.file}: {test}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations caught")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""An interpreter with a toy vLLM that generates one token per request and step."""

import sys
from pathlib import Path

import pytest

TOY = """
from types import SimpleNamespace
__version__ = "9.9"
class SamplingParams(SimpleNamespace): pass
class Engine:
    def __init__(self, most):
        self.live, self.most, self.limit = {}, 0, most
    def add_request(self, key, prompt, params):
        self.live[key] = [params, 0]
        self.most = max(self.most, len(self.live))
        assert len(self.live) <= self.limit, f"Error: {len(self.live)} requests at once"
    def has_unfinished_requests(self): return bool(self.live)
    def step(self):
        ended = []
        for key, entry in list(self.live.items()):
            entry[1] += 1
            if entry[1] == entry[0].max_tokens:
                del self.live[key]
                answer = SimpleNamespace(token_ids=[0] * entry[1])
                ended.append(SimpleNamespace(finished=True, outputs=[answer]))
        return ended
class LLM:
    def __init__(self, **options):
        print("noise on stdout")
        if options.get("speculative_config"):
            raise ValueError("no drafts here")
        self.llm_engine = Engine(options["max_num_seqs"])
"""


@pytest.fixture
def vllm_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(TOY)
    (site / "vllm" / "sampling_params.py").write_text("class RequestOutputKind: FINAL_ONLY = 2\n")
    (site / "vllm-9.9.dist-info").mkdir()
    (site / "vllm-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    return sys.executable

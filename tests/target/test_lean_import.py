"""Each in a process of its own: what is imported here stays imported."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

HEAVY = "('torch._dynamo', 'torch.distributed.tensor', 'sympy', 'scipy', 'llguidance')"


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_a_server_imports_no_compiler_no_distributed_tensors_and_no_grammars_and_all_are_there_for_others():
    run(f"""
import sys, torch
available = torch.distributed.is_available()
from eyas.cli.libraries import import_libraries
import_libraries(lean=True)
import eyas.engine.engine, eyas.loading, eyas.serve.app, eyas.serve.transport.server
from transformers import LlamaForCausalLM, Qwen3ForCausalLM
found = [name for name in {HEAVY} if name in sys.modules]
assert not found, found
assert torch.distributed.is_available() == available
import torch._dynamo
assert torch._dynamo.config.recompile_limit > 0
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers import masking_utils
assert isinstance(masking_utils.TransformGetItemToIndex(), TransformGetItemToIndex)
""")


def test_where_transformers_wants_more_it_is_imported_as_it_is_and_that_is_said():
    run("""
import logging, sys, torch
from eyas.target import lean_import
told = []
lean_import.logger.setLevel(logging.INFO)
lean_import.logger.addHandler(type("Handler", (logging.Handler,), {"emit": lambda self, one: told.append(one)})())
once = [AttributeError("module has no such attribute")]
plainly = lean_import._import
def first_fails():
    import transformers.utils
    if once:
        raise once.pop()
    plainly()
lean_import._import = first_fails
lean_import.import_transformers()
from transformers import PreTrainedModel
assert "no such attribute" in told[0].getMessage()
assert "torch._dynamo" in sys.modules
""")


@pytest.mark.default
def test_the_default_pair_is_loaded_without_a_compiler():
    run(f"""
import sys
from eyas.cli.libraries import import_libraries
import_libraries(lean=True)
from eyas.serve.speculative_config import read_speculative_config
from eyas.loading import load_pair
drafter = read_speculative_config(None, "smollm2").drafter
load_pair("smollm2", drafter, dtype="auto", device="cpu")
found = [name for name in {HEAVY} if name in sys.modules]
assert not found, found
""")

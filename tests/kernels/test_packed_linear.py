import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from each import each
from eyas.kernels.linear.packed_linear import LinearKernel, PackedLinear, load_kernel, pack, pack_linears
from eyas.kernels.native import LIBRARY

SHAPES = [(1, 1), (3, 5), (16, 16), (33, 127), (64, 129), (50, 300), (192, 576)]  # outputs, inputs


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def kernel(cache: Path) -> LinearKernel:
    found, words = load_kernel(cache=cache)
    if found is None:
        pytest.skip(f"no kernel here: {words}")
    return found


@pytest.fixture(scope="module")
def vectors(kernel: LinearKernel, native_cache: Path) -> LinearKernel:
    """The kernel without the CPU's matrix unit."""
    if not kernel.tiles:
        return kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "cc -mno-amx-bf16")
        found, words = load_kernel(cache=native_cache)
    assert found is not None, words
    assert not found.tiles
    return found


def make_linear(outputs: int, inputs: int, *, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias)
    linear.weight.normal_()
    return linear


def error_against_float64(linear: nn.Linear, x: Tensor, y: Tensor) -> float:
    return float((y - nn.functional.linear(x.double(), linear.weight.double())).square().mean().sqrt())


def make_halvable(outputs: int, inputs: int, *, bias: bool = False, seed: int = 0) -> nn.Linear:
    linear = make_linear(outputs, inputs, bias=bias, seed=seed)
    linear.weight.copy_(linear.weight.bfloat16())
    return linear


@each(("outputs", "inputs"), SHAPES)
@each("bias", [False, True])
@each("halve", [False, True])
def test_it_computes_what_nn_linear_computes(kernel, threads, outputs, inputs, bias, halve):
    linear = make_halvable(outputs, inputs, bias=bias)
    (packed,) = pack(kernel, [linear], halve=halve)
    for rows in range(1, 71):
        x = torch.randn(rows, inputs)
        torch.testing.assert_close(packed(x), linear(x), rtol=1e-5, atol=2e-6 * inputs**0.5 * 3)


@each("inputs", [576, 1536, 4096])
@each("rows", [1, 2, 8, 70])
@each("halve", [False, True])
def test_its_rounding_error_is_at_most_twice_that_of_torch(kernel, inputs, rows, halve):
    linear = make_halvable(512, inputs)
    (packed,) = pack(kernel, [linear], halve=halve)
    x = torch.randn(rows, inputs)
    ours, theirs = (error_against_float64(linear, x, module(x)) for module in (packed, linear))
    assert ours <= 2 * theirs


@each("size", [1e-25, 1.0, 1e30])
def test_no_bit_of_an_input_is_lost_at_any_magnitude(kernel, size):
    linear = nn.Linear(64, 64, bias=False)
    linear.weight.copy_(torch.eye(64).roll(1, dims=0))
    (packed,) = pack(kernel, [linear], halve=True)
    x = torch.randn(5, 64) * size
    assert torch.equal(packed(x), x.roll(1, dims=1))


def test_more_inputs_than_caches_hold(kernel):
    linear = make_halvable(40, 5000)
    (packed,) = pack(kernel, [linear], halve=True)
    x = torch.randn(150, 5000)
    assert torch.equal(packed(x), torch.cat([packed(part) for part in x.split(7)]))


@each(("outputs", "inputs"), SHAPES)
@each("halve", [False, True])
def test_a_row_does_not_depend_on_the_rows_beside_it(kernel, threads, outputs, inputs, halve):
    (packed,) = pack(kernel, [make_halvable(outputs, inputs, bias=True)], halve=halve)
    x = torch.randn(200, inputs)
    one_by_one = torch.cat([packed(row) for row in x.split(1)])
    for rows in (*range(2, 34), 63, 64, 65, 128, 200):
        assert torch.equal(packed(x[:rows]), one_by_one[:rows])
        assert torch.equal(packed(x[-rows:]), one_by_one[-rows:])


@each("halve", [False, True])
def test_a_result_does_not_depend_on_the_number_of_threads(kernel, halve):
    (packed,) = pack(kernel, [make_halvable(300, 500)], halve=halve)
    x = torch.randn(9, 500)
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(packed(x))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@each("shape", [(20,), (2, 3, 20), (1, 1, 20), (0, 20), (2, 0, 20)])
def test_inputs_have_any_leading_shape(kernel, shape):
    linear = make_linear(7, 20)
    (packed,) = pack(kernel, [linear])
    x = torch.randn(shape)
    assert packed(x).shape == linear(x).shape
    torch.testing.assert_close(packed(x), linear(x), rtol=1e-5, atol=1e-5)


def test_inputs_may_be_strided(kernel):
    (packed,) = pack(kernel, [make_linear(7, 20)])
    x = torch.randn(5, 40)[:, ::2]
    assert torch.equal(packed(x), packed(x.contiguous()))
    assert torch.equal(packed(x[:1].expand(3, 20)), packed(x[[0, 0, 0]]))


def test_a_wrong_number_of_inputs_is_refused_as_torch_refuses_it(kernel):
    (packed,) = pack(kernel, [make_linear(7, 20)])
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        packed(torch.randn(2, 10))


def test_the_weight_comes_back_as_it_was(kernel):
    linear = make_linear(33, 127, bias=True)
    (packed,) = pack(kernel, [linear])
    assert torch.equal(packed.weight, linear.weight)
    ours, theirs = packed.state_dict(), linear.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_gradients_and_other_dtypes_run_unpacked(kernel):
    linear = make_linear(33, 20, bias=True)
    (packed,) = pack(kernel, [linear])
    with torch.enable_grad():
        x = torch.randn(2, 20, requires_grad=True)
        packed(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(2, 20))
    x = torch.randn(2, 20, dtype=torch.float64)
    torch.testing.assert_close(packed.double()(x), linear.double()(x))


@each(("outputs", "inputs"), SHAPES)
@each("bias", [False, True])
def test_halved_weights_have_the_same_bits_with_vectors(vectors, threads, outputs, inputs, bias):
    linear = make_halvable(outputs, inputs, bias=bias)
    (whole,), (halved,) = pack(vectors, [linear]), pack(vectors, [linear], halve=True)
    assert (whole.halved, halved.halved) == (False, True)
    assert 2 * halved.panels_PKC[:, :inputs].nbytes == whole.panels_PKC.nbytes
    for rows in (*range(1, 20), 48, 49, 70):
        x = torch.randn(rows, inputs)
        assert torch.equal(halved(x), whole(x))
    assert torch.equal(halved.weight, linear.weight)
    assert torch.equal(halved.state_dict()["weight"], linear.weight)


def test_one_weight_that_bfloat16_cannot_hold_prevents_halving(kernel):
    linears = [make_linear(kernel.width, 24, seed=n) for n in (1, 2)]
    for linear in linears:
        linear.weight.copy_(linear.weight.bfloat16())
    assert all(part.halved for part in pack(kernel, linears, halve=True))
    linears[1].weight[3, 5] = 1 + 2**-10
    assert not any(part.halved for part in pack(kernel, linears, halve=True))


@each("dtype", [torch.bfloat16, torch.float32, torch.float64])
@each("halve", [False, True])
def test_panels_keep_their_layout_when_cast(kernel, dtype, halve):
    linears = [make_linear(n, 24) for n in (kernel.width, 33)]
    for linear in linears:
        linear.weight.copy_(linear.weight.bfloat16())
    packed = [part.to(dtype) for part in pack(kernel, linears, halve=halve)]
    x = torch.randn(3, 24).to(dtype)
    for part, linear in zip(packed, linears, strict=True):
        torch.testing.assert_close(part(x), nn.functional.linear(x, linear.weight.to(dtype)))


def test_halved_linears_run_as_one(kernel):
    linears = [make_linear(n, 24, seed=n) for n in (2 * kernel.width, kernel.width + 1)]
    for linear in linears:
        linear.weight.copy_(linear.weight.bfloat16())
    packed, x = pack(kernel, linears, halve=True), torch.randn(3, 24)
    assert torch.equal(PackedLinear.join(packed)(x), torch.cat([part(x) for part in packed], dim=-1))


def test_linears_packed_together_run_as_one(kernel):
    width = kernel.width
    linears = [make_linear(n, 24, bias=n == width, seed=n) for n in (2 * width, width, width + 1)]
    packed = pack(kernel, linears)
    x = torch.randn(3, 24)
    whole = PackedLinear.join(packed)
    assert torch.equal(whole(x), torch.cat([part(x) for part in packed], dim=-1))
    assert whole.panels_PKC.data_ptr() == packed[0].panels_PKC.data_ptr()
    assert torch.equal(PackedLinear.join(packed[1:])(x), torch.cat([part(x) for part in packed[1:]], dim=-1))


def test_linears_that_are_not_adjacent_are_not_joined(kernel):
    linears = [make_linear(kernel.width + 1, 24), make_linear(kernel.width, 24)]
    assert PackedLinear.join(pack(kernel, linears)) is None
    assert PackedLinear.join([pack(kernel, [linear])[0] for linear in linears]) is None


def tiny_llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **changes,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@each("tied", [False, True])
def test_a_packed_model_gives_the_same_scores(kernel, cache, tied):
    model = tiny_llama(tie_word_embeddings=tied)
    ids = torch.randint(99, (2, 13))
    before, answer = model(ids).logits, model.generate(ids, max_new_tokens=8, do_sample=False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    packing = pack_linears(model, cache=cache)
    assert packing.linears == 2 * 7 + 1
    assert not any(type(module) is nn.Linear for module in model.modules())
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), answer)
    assert torch.equal(model.get_input_embeddings().weight, state["model.embed_tokens.weight"])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@each("tied", [False, True])
def test_a_bfloat16_model_computes_in_float32_from_the_weights_as_they_are(kernel, cache, tied):
    model = tiny_llama(tie_word_embeddings=tied, attention_bias=True).bfloat16()
    ids = torch.arange(12).view(2, 6)
    expected = deepcopy(model).float()(input_ids=ids).logits
    packing = pack_linears(model, halve=True, widen=True, cache=cache)
    assert packing.linears == 2 * 7 + 1
    assert model.dtype == torch.float32
    panels = [module.panels_PKC for module in model.modules() if isinstance(module, PackedLinear)]
    assert {x.dtype for x in panels} == {torch.bfloat16}
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


@each("obstacle", ["a matrix of its own", "whole panels", "nobody asked"])
def test_a_bfloat16_model_is_not_widened_if_it_would_grow(kernel, cache, obstacle):
    model = tiny_llama().bfloat16()
    if obstacle == "a matrix of its own":
        model.model.experts = nn.Parameter(torch.ones(2, 3, 4, dtype=torch.bfloat16), requires_grad=False)
    asked, halve = obstacle != "nobody asked", obstacle != "whole panels"
    assert not pack_linears(model, halve=halve, widen=asked, cache=cache).linears
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_panels_are_halved_by_default_where_that_pays(kernel, cache):
    model = tiny_llama()
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    pack_linears(model, cache=cache)
    assert model.lm_head.halved == kernel.halving_pays


def test_attention_and_mlp_of_a_packed_model_can_run_joined(kernel, cache):
    config = Qwen2Config(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=9)
    model = Qwen2ForCausalLM(config).eval()
    pack_linears(model, cache=cache)
    x = torch.randn(3, 64)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for parts in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        assert all(isinstance(part, PackedLinear) for part in parts)
        assert torch.equal(PackedLinear.join(parts)(x), torch.cat([part(x) for part in parts], dim=-1))


def test_linears_of_other_types_or_with_hooks_are_not_packed(kernel, cache):
    class Scaled(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), Scaled(8, 8), nn.Linear(8, 8))
    model[2].register_forward_hook(lambda *_: None)
    packing = pack_linears(model, cache=cache)
    assert packing.linears == 0
    assert "no float32 linears" in packing.words


def test_without_a_compiler_nothing_is_packed_and_the_reason_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    model = tiny_llama()
    packing = pack_linears(model, cache=tmp_path)
    assert packing.linears == 0
    assert "no C compiler" in packing.words
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_failing_compiler_is_quoted(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho "error: no luck" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found, words = load_kernel(cache=tmp_path / "cache")
    assert found is None
    assert "error: no luck" in words
    assert not list((tmp_path / "cache" / "native").glob("packed_linear-*"))


def test_a_cache_that_cannot_be_written_is_a_reason(kernel, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    found, words = load_kernel(cache=blocked)
    assert found is None
    assert str(blocked) in words


def test_another_platform_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "win32")
    assert load_kernel(cache=tmp_path) == (None, "native code is made on Linux only, this is win32")


@pytest.mark.slow
@each("damage", ["cut", "flipped", "gone", "empty"])
def test_a_damaged_library_is_compiled_again(kernel, cache, tmp_path, damage):
    shutil.copytree(cache / "native", tmp_path / "native")
    libraries = list((tmp_path / "native").glob(f"*/{LIBRARY}"))
    assert sorted(library.parent.name.rpartition("-")[0] for library in libraries) == ["packed_linear", "threads"]
    sizes = [library.stat().st_size for library in libraries]
    for library in libraries:
        whole = library.read_bytes()
        if damage == "gone":
            library.unlink()
        else:
            middle = len(whole) // 2
            flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
            library.write_bytes({"cut": whole[:middle], "flipped": flipped, "empty": b""}[damage])
    found, words = load_kernel(cache=tmp_path)
    assert found is not None, words
    assert [library.stat().st_size for library in libraries] == sizes


@pytest.mark.slow
def test_another_processor_means_another_library(kernel, cache, monkeypatch, tmp_path):
    shutil.copytree(cache / "native", tmp_path / "native")
    monkeypatch.setattr("eyas.kernels.native._processor", lambda: "another one")
    found, words = load_kernel(cache=tmp_path)
    assert found is not None, words
    assert len(list((tmp_path / "native").glob(f"packed_linear-*/{LIBRARY}"))) == 2


@pytest.mark.slow
def test_two_processes_may_compile_at_the_same_time(kernel, tmp_path):
    script = f"""
from pathlib import Path
from eyas.kernels.linear.packed_linear import load_kernel
print(load_kernel(cache=Path({str(tmp_path)!r}))[1])
"""
    workers = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [worker.communicate(timeout=120)[0].strip() for worker in workers] == [load_kernel(cache=tmp_path)[1]] * 2
    assert len(list((tmp_path / "native").glob("packed_linear-*"))) == 1
    assert not list((tmp_path / "native").glob(".*.partial-*"))

"""Where there is a C compiler every kernel is compiled: a missing source must not look like a slow machine."""

import shutil

import pytest

from eyas.kernels.attention.cpu import load_kernel as load_attention
from eyas.kernels.elementwise import load_elementwise
from eyas.kernels.linear.packed_linear import load_kernel as load_linear
from eyas.kernels.llama.cpu import load_layers


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_every_kernel_is_compiled_where_there_is_a_compiler() -> None:
    attention, of_attention = load_attention()
    linear, of_linear = load_linear()
    assert attention is not None, of_attention
    assert linear is not None, of_linear
    assert load_elementwise() is not None
    assert load_layers() is not None

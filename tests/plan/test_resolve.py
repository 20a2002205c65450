"""Names are resolved to configurations without torch and without reading weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from each import each
from eyas.errors import UserError
from eyas.plan.decoder import read_decoder
from eyas.plan.resolve import drafter_shape, require_match, target_config, usual_drafter
from known_configs import LLAMA_8B


@pytest.mark.slow
@each("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_has_the_parameters_of_its_model(tmp_path: Path, family: str) -> None:
    from tiny_gguf import tiny_model, write_gguf

    model = tiny_model(family)
    write_gguf(model, tmp_path / "tiny.gguf")
    decoder = read_decoder(target_config(str(tmp_path / "tiny.gguf")), "tiny")
    assert decoder.parameters == sum(parameter.numel() for parameter in model.parameters())
    script = f"import sys; from eyas.plan.resolve import target_config as t; t({str(tmp_path / 'tiny.gguf')!r})"
    subprocess.run([sys.executable, "-c", f"{script}; assert 'torch' not in sys.modules"], check=True)


def test_the_usual_drafter_has_a_valid_shape() -> None:
    decoder = read_decoder(LLAMA_8B, "llama")
    drafter = usual_drafter(decoder)
    require_match(decoder, drafter)
    assert drafter.assumed
    assert drafter.config.family == "EAGLE-3.1"
    assert (drafter.own_embedding, drafter.own_head) == (False, True)


def test_a_shipped_drafter_is_found_by_name() -> None:
    drafter = drafter_shape("smollm2-eagle3.1")
    assert drafter.name == "smollm2-eagle3.1"
    assert drafter.config.draft_vocab_size == 16384
    assert (drafter.own_embedding, drafter.own_head) == (False, True)


def test_damaged_drafter_weights_are_refused(tmp_path: Path) -> None:
    from eyas.drafter.shipped import shipped_folder

    shipped = shipped_folder("smollm2-eagle3.1")
    assert shipped is not None
    (tmp_path / "config.json").write_text((shipped / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00")
    with pytest.raises(UserError, match="no readable header"):
        drafter_shape(str(tmp_path))


@each("source", ["", " ", "./nowhere", "/nowhere", "a/b/c", "nowhere.json", "~nobody/x", "\0"])
def test_unknown_names_are_refused(source: str) -> None:
    with pytest.raises(UserError):
        target_config(source)

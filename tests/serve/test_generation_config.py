"""A generation config decides what requests leave out, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from each import each
from eyas.errors import UserError
from eyas.serve.model_info import banner
from eyas.serve.protocol.completions import ChatCompletionRequest, CompletionRequest
from eyas.target.text import SamplingDefaults, read_defaults

SAID = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2, "max_new_tokens": 9}


def folder_of(path: Path, **values: Any) -> str:
    (path / "generation_config.json").write_text(json.dumps(values))
    return str(path)


def test_the_files_values_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, **SAID, do_sample=True, eos_token_id=[2])
    assert read_defaults(folder, None) == SamplingDefaults(**SAID)  # type: ignore[arg-type]
    own = GenerationConfig.from_pretrained(folder)
    assert read_defaults("auto", own).given == SAID
    assert read_defaults("vllm", own).given == {}
    sampled = GenerationConfig(do_sample=True, top_k=64)
    assert read_defaults("auto", sampled).given == {"temperature": 1.0, "top_k": 64}
    assert read_defaults("auto", None).given == {}


@each("wrong", [{"temperature": 1e-9}, {"top_p": 7.0}, {"max_new_tokens": 0}, {"top_k": "many"}])
def test_a_value_that_cannot_be_used_fails_at_the_start(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"generation.config"):
        read_defaults(folder_of(tmp_path, **wrong), None)
    with pytest.raises(UserError, match="neither auto"):
        read_defaults(str(tmp_path / "nowhere"), None)


def test_requests_get_the_defaults(new_server: Any) -> None:
    with new_server(sampling_defaults=SamplingDefaults(**SAID)) as client:  # type: ignore[arg-type]
        builder = client.application.context.request_builder
        messages = [{"role": "user", "content": "a"}]
        plain = builder.chat(ChatCompletionRequest.model_validate({"messages": messages}), None).requests[0]
        assert {name: getattr(plain.sampling, name) for name in SAID if name != "max_new_tokens"} | {
            "max_new_tokens": plain.max_new_tokens
        } == SAID
        said = {"messages": messages, "temperature": 0.0, "top_k": -1, "top_p": None, "max_tokens": 30}
        own = builder.chat(ChatCompletionRequest.model_validate(said), None).requests[0]
        assert (own.sampling.temperature, own.sampling.top_k, own.sampling.top_p) == (0.0, 0, 0.8)
        assert own.max_new_tokens == 30
        assert builder.completion(CompletionRequest(prompt="a"), None).requests[0].max_new_tokens == 16
        assert client.get("/status").json["served"]["sampling_defaults"] == SAID
        context = client.application.context
        assert "temperature 0.6, top_p 0.8" in "\n".join(banner(context.model_info, context.engine_client.budget))


def test_without_a_generation_config_the_api_defaults_apply(client: Any) -> None:
    builder = client.application.context.request_builder
    sampling = builder.completion(CompletionRequest(prompt="a"), None).requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert client.get("/status").json["served"]["sampling_defaults"] == {}

"""Translates a request for vLLM, or says why vLLM cannot answer it.

Nothing is left out silently: options that vLLM would ignore or change are refused here, under their API names.
"""

import json
from typing import Any

from eyas.engine.grammar import Grammar
from eyas.engine.request import Request, Speculation
from eyas.grammar.after_reasoning import AfterReasoningGrammar
from eyas.grammar.compile import ON_ONE_LINE
from eyas.grammar.llguidance import LlGuidanceGrammar
from eyas.serve.api_error import ApiError
from eyas.serve.vllm.version import SEAM

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower temperatures to the first and refuses those above the second."""
UNSEEDED = -1
"""The seed that vLLM treats as none."""


def generate_body(request: Request, *, model: str, served: Speculation | None, on_cpu: bool = False) -> dict[str, Any]:
    """The body of /inference/v1/generate; `served` is vLLM's speculation, None without a drafter."""
    require_supported(request, served, on_cpu)
    body: dict[str, Any] = {
        "model": model,
        "token_ids": list(request.prompt),
        "sampling_params": _sampling_params(request),
        "stream": request.prompt_logprobs is None,  # its streams do not contain them
        "priority": request.priority,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body | ({"cache_salt": request.cache_salt} if request.cache_salt else {})


def _sampling_params(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_tokens": request.max_new_tokens,
        "min_tokens": request.min_new_tokens,
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": True,  # all ends are among the stop ids
        "stop": list(request.stop_strings),
        "detokenize": bool(request.stop_strings),
        "skip_special_tokens": request.skip_special_tokens,
    }
    if sampling.temperature:
        params |= {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        # vLLM samples rows with seeds one by one, so only seeds of the client are passed on.
        if request.seeded:
            params["seed"] = request.seed if request.seed != UNSEEDED else 2**63 - 1
    if sampling.bias_pairs:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.bias_pairs}
    if sampling.allowed_tokens is not None:
        params["allowed_token_ids"] = sorted(sampling.allowed_tokens)
    if request.logprobs is not None:
        params["logprobs"] = request.logprobs + 1  # see `answers.py`
    if request.prompt_logprobs is not None:
        params["prompt_logprobs"] = request.prompt_logprobs
    if request.grammar is not None:
        params["structured_outputs"] = _structured_outputs(request.grammar)
    return params


def require_supported(request: Request, served: Speculation | None, on_cpu: bool) -> None:
    """Refuse options that vLLM does not support."""
    sampling, wished = request.sampling, request.speculation
    if wished.mode == "off" and served is not None:
        raise _refusal("speculative", "vLLM drafts for all requests alike; leave it out, or serve without a drafter")
    if wished.mode == "fixed" and (served is None or wished.depth != served.depth):
        how = "it has no drafter" if served is None else f"it drafts {_words(served)} for all requests alike"
        raise _refusal("speculative", f"depth {wished.depth} was asked for, and vLLM cannot: {how}; leave it out")
    if wished.method == "suffix":
        raise _refusal("speculative", "method suffix is for eyas' own engine; leave it out")
    if request.bad_words:
        raise _refusal("bad_words", "vLLM forbids fewer spellings of a word than eyas promises; leave it out")
    if sampling.temperature and not LEAST_TEMPERATURE <= sampling.temperature <= MOST_TEMPERATURE:
        raise _refusal(
            "temperature",
            f"{sampling.temperature:g} is outside the {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g} that vLLM takes; "
            "choose within, or 0",
        )
    if served is None:
        return
    if sampling.temperature and on_cpu:
        # `expand_kernel` of its CPU build writes into a copy of temperatures, top_k and top_p unless they are int64.
        raise _refusal(
            "temperature",
            f"{sampling.temperature:g} while it drafts: vLLM {SEAM} on a CPU draws by temperatures, top_k and top_p "
            "that it never writes, so answers would be noise; use 0, or serve without a drafter",
        )
    if sampling.bias_pairs:
        raise _refusal("logit_bias", "vLLM does not take it while it drafts; leave it out, or serve without a drafter")
    if sampling.min_p and sampling.temperature:
        raise _refusal("min_p", "vLLM does not take it while it drafts; leave it out, or serve without a drafter")


def _structured_outputs(grammar: Grammar) -> dict[str, Any]:
    """The grammar's source. vLLM compiles it with the same library, with eyas' JSON format."""
    if isinstance(grammar, AfterReasoningGrammar):
        raise _refusal("response_format", "vLLM cannot be told where reasoning ends here; serve without a parser of it")
    if not isinstance(grammar, LlGuidanceGrammar):
        raise _refusal("response_format", f"a {type(grammar).__name__} has no form that vLLM reads; leave it out")
    if grammar.kind == "json":
        schema = json.loads(grammar.text)
        if not isinstance(schema, dict):
            raise _refusal("response_format", f"vLLM takes a schema that is an object, not {grammar.text[:40]}")
        return {"json": {"x-guidance": ON_ONE_LINE} | schema}
    if grammar.kind == "choice":
        return {"choice": json.loads(grammar.text)}
    return {"regex" if grammar.kind == "regex" else "grammar": grammar.text}


def _refusal(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: {why}", field=field, code="unsupported_parameter")


def _words(speculation: Speculation) -> str:
    return f"{speculation.depth} deep" if speculation.mode == "fixed" else "by its table of batch sizes"

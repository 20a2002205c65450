"""Decides whose answers are kept: those of callers that opted in, unless the request says otherwise.

A request with a `cache_salt` asks to share nothing with others of its key, not even timing, and timing shows what a
drafter has learnt. A request with OpenAI's `"store": false` asks not to be kept. Both are left out unless they set
`learn`.
"""

from eyas.serve.access.caller import Caller
from eyas.serve.api_error import ApiError
from eyas.serve.protocol.completions import GenerationRequest

FIELD = "speculative.learn"


def may_learn(body: GenerationRequest, caller: Caller, *, collecting: bool) -> bool:
    """Whether the answers to a request are kept. An error if it asks for that and cannot get it."""
    wish = None if body.speculative is None else body.speculative.learn
    allowed = collecting and caller.learns
    if wish and not allowed:
        why = (
            "this key has not opted in; leave it out, or have the operator add --learn-key"
            if collecting
            else "this server keeps no answers; leave it out, or start the server with --learn"
        )
        raise ApiError(400, f"{FIELD} is true, but {why}", field=FIELD)
    if wish is None:
        wish = body.cache_salt is None and (body.store or "store" not in body.model_fields_set)
    return allowed and wish

"""Whose answers are kept: of callers that opted in, where the request does not say otherwise.

A request with a `cache_salt` asks to share nothing with others of its key, not even times, and what a drafter learnt
shows in times. One that says `"store": false` asks in OpenAI's words not to be kept. Both are left out unless they ask
to be learnt from.
"""

from eyas.serve.access.caller import Caller
from eyas.serve.api_error import ApiError
from eyas.serve.protocol.completions import GenerationRequest

FIELD = "speculative.learn"


def may_learn(body: GenerationRequest, caller: Caller, *, collecting: bool) -> bool:
    """Whether the answers to a request are kept; an error if it asks for what is not done."""
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

"""Count what a JSON body holds before it is parsed: a small body can ask for gigabytes of objects.

A byte of text costs a byte, but `{}` costs hundreds. Parsing 4 MiB of `{},` held up every other request for a minute,
because the parser does not share the interpreter. Numbers are cheap, so lists of token ids may be as long as the body.
"""

import re

from eyas.serve.api_error import ApiError

MAX_VALUES = 65_536
"""Strings (keys too), lists and objects of one body. 2048 messages of several parts each are a third of it."""
# Possessive, so that nothing is scanned twice; a string without an end reaches to the end of the body.
_STRING_OR_OPENING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[{]', re.DOTALL)


def check_shape(body: bytes) -> None:
    """Raise an error if the body has more strings, lists and objects than any request needs."""
    # Every one of them begins with such a sign; inside strings there may be more, so count those only if in doubt.
    if sum(body.count(sign) for sign in (b'"', b"[", b"{")) <= MAX_VALUES:
        return
    for count, _ in enumerate(_STRING_OR_OPENING.finditer(body), 1):
        if count > MAX_VALUES:
            message = f"the body has more than {MAX_VALUES:,} strings, lists and objects; send fewer in one request"
            raise ApiError(413, message, code="too_large")

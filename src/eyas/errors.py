"""The one exception meant for people.

Invariant: the message is a single line that names the offending value, the limit it breaks and the fix.
The command line prints it as it is and exits with code 2; anything else that escapes is a bug in eyas.
"""


class UserError(Exception):
    """Something the user gave cannot be used; the message says what, why and what to do about it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

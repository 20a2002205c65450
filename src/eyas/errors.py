"""The exception for errors of the user.

Its message is one line that names the wrong value, the limit and the fix. The command line prints it and exits with
code 2; any other exception is a bug in eyas.
"""


class UserError(Exception):
    """An input cannot be used; the message says what is wrong and how to fix it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

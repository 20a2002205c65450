"""Comparison with llama.cpp's rendering, against a toy server."""

import sys
from pathlib import Path

import pytest
from gguf_templates import CASES, compare, difference

from chat_tokenizer import letter_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOY = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Toy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(200, {{}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "{wrong}" == "refuses":
            return self.say(400, {{}})
        text = "".join(m["role"] + ": " + m["content"] + "\\n" for m in body["messages"])
        self.say(200, {{"prompt": text + "{wrong}"}})
    def say(self, status, answer):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Toy).serve_forever()
"""


@pytest.mark.parametrize("wrong", ["", " ", "refuses"])
def test_every_conversation_is_compared(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "a template"
    template.write_text(TEMPLATE)
    program = tmp_path / "llama-server"
    program.write_text(TOY.format(python=sys.executable, wrong=wrong))
    program.chmod(0o755)
    assert compare(tmp_path / "model.gguf", template, letter_tokenizer(), str(program)) == (len(CASES) if wrong else 0)
    said = capsys.readouterr().out
    if wrong:
        assert ("llama.cpp refuses it" if wrong == "refuses" else "France?\\n', llama.cpp 'user") in said
    else:
        every = len(CASES)
        assert said == f"a template: {every} of {every} conversations are the same, 0 of them refused by both\n"


def test_a_server_that_does_not_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho no such option\nexit 3\n")
    program.chmod(0o755)
    assert compare(tmp_path / "model.gguf", None, letter_tokenizer(), str(program)) == 1
    assert "does not start with it: no such option" in capsys.readouterr().out


def test_the_first_difference_is_shown() -> None:
    assert difference("abc", "abd") == "'abc', llama.cpp 'abd'"
    assert difference("ab", "abd") == "'ab', llama.cpp 'abd'"
    assert difference(None, "a") == "eyas refuses it"

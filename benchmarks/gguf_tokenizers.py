"""Checks that tokenizers made from GGUF files split text as llama.cpp does.

    python benchmarks/gguf_tokenizers.py --llama-tokenize build/bin/llama-tokenize \\
        --text prompts.jsonl --text README.md models/ggml-vocab-*.gguf

llama.cpp's source has files that are a vocabulary alone (`models/ggml-vocab-*.gguf`); whole models serve as well. A
text is a file, or the `prompt` of every line of a .jsonl file (--limit). Files that eyas refuses are told with the
reason, and texts that differ with the first token that does. Qwen's texts are brought to Unicode's composed form, as
Qwen's own tokenizer does and llama.cpp does not: texts in another form differ there.
"""

import argparse
import ast
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer

from eyas.errors import UserError
from eyas.target.gguf_file import GgufFile
from eyas.target.gguf_tokenizer import write_tokenizer

ANY_SIZE = 2**31
"""Config of a vocabulary without embeddings."""


def main() -> None:
    """Compare, and exit with 1 if any text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="GGUF")
    parser.add_argument("--llama-tokenize", required=True, help="llama.cpp's program")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--limit", type=int, default=100, help="lines of a .jsonl file")
    options = parser.parse_args()
    texts = [text for path in options.text for text in texts_of(path, options.limit)]
    differ = 0
    for path in options.files:
        differ += compare(path, texts, options.llama_tokenize)
    raise SystemExit(1 if differ else 0)


def texts_of(path: Path, limit: int) -> Iterator[str]:
    """The texts of a file."""
    if path.suffix != ".jsonl":
        yield path.read_text()
        return
    with path.open() as stream:
        yield from (json.loads(line)["prompt"] for line in islice(stream, limit))


def compare(path: Path, texts: Sequence[str], program: str) -> int:
    """Print how many texts agree; return how many differ."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_tokenizer(GgufFile(path), Path(folder), vocab_size=ANY_SIZE, max_length=ANY_SIZE)
        except UserError as error:
            print(f"{path.name}: refused: {error}", flush=True)
            return 0
        tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = differ = 0
    for text in texts:
        ours, theirs = tokenizer.encode(text, add_special_tokens=False), tokens_of_llama(path, text, program)
        tokens += len(theirs)
        if ours == theirs:
            continue
        differ += 1
        at = next((k for k, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
        words = [tokenizer.convert_ids_to_tokens(ids[at : at + 3]) for ids in (ours, theirs)]
        print(f"{path.name}: {text[:40]!r} differs at token {at}: {words[0]}, llama.cpp {words[1]}", flush=True)
    print(f"{path.name}: {len(texts) - differ} of {len(texts)} texts are the same, {tokens} tokens", flush=True)
    return differ


def tokens_of_llama(path: Path, text: str, program: str) -> list[int]:
    """Token ids by llama.cpp; special tokens in the text count as such, and none is added."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", newline="") as stream:
        stream.write(text)
        stream.flush()
        command = [program, "-m", str(path), "-f", stream.name, "--ids", "--no-bos", "--log-disable"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ids: list[int] = ast.literal_eval(found.strip())
    return ids


if __name__ == "__main__":
    main()

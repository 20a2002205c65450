"""Tasks over articles: excerpts to summarise, questions with and without documents."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prompt_line import MAX_TOKENS, Prompt, estimated_tokens
from wiki_articles import Article, excerpt
from wordings import ANY_QUESTIONS, DOCUMENT, QUESTIONS, RAG


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

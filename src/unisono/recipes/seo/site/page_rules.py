"""Checks the HTML of a page with fixed rules.

Every rule is deterministic and reports what it found and what to do. No rule is learned, and none is combined with a
model's score.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from unisono.formatting import format_count
from unisono.recipes.seo.site.text_rules import (
    FIRST_WORDS,
    Check,
    contains,
    first_words,
    frequency,
    frequency_text,
    is_stuffed,
    length_check,
    readability_check,
    words_of,
)

if TYPE_CHECKING:
    from unisono.recipes.seo.data.pages import Page

MAX_TITLE, MAX_DESCRIPTION = 60, 155
"""Maximum lengths in characters; search engines truncate longer texts."""

_LANGUAGE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{1,8})*")

Exists = Callable[[str], bool | None]
"""Whether the target of a link exists; None if that is not checked."""


def check_page(page: Page, keywords: Sequence[str] = (), exists: Exists | None = None) -> list[Check]:
    """Returns the results of all checks of a page, always in the same order."""
    return [
        _check("HTML", _listed(page.problems), "valid", "Correct the HTML; otherwise search engines have to guess."),
        _length("title", page.title, MAX_TITLE),
        _length("description", page.description, MAX_DESCRIPTION),
        _one_h1(page),
        _heading_order(page),
        _links(page),
        *([_broken_links(page, exists)] if exists else []),
        _image_texts(page),
        length_check(page.text),
        readability_check(page.text, page.lang),
        _language(page),
        _canonical(page),
        *(keyword_check(page, keyword) for keyword in keywords if words_of(keyword)),
    ]


def _check(name: str, problem: str, otherwise: str, advice: str) -> Check:
    return Check(name, not problem, problem or otherwise, advice if problem else "")


def _listed(texts: Iterable[str], most: int = 5) -> str:
    """Lists only the first few entries, so that even ten thousand bad links fit on one line."""
    shortened = [text if len(text) <= 100 else f"{text[:99]}…" for text in texts]
    more = f" and {len(shortened) - most:,} more" if len(shortened) > most else ""
    return "; ".join(shortened[:most]) + more


def _length(name: str, text: str | None, most: int) -> Check:
    if text is None:
        return Check(name, False, "missing", f"Add a {name} of at most {most} characters.")
    size = len(" ".join(text.split()))
    if not size:
        return Check(name, False, "empty", f"Describe the page in at most {most} characters.")
    advice = f"Shorten it to {most} characters; search results hide the rest."
    return Check(name, size <= most, f"{size:,} characters", advice if size > most else "")


def _one_h1(page: Page) -> Check:
    headlines = [text for level, text in page.headings if level == 1]
    if not headlines:
        return Check("one h1", False, "no h1", "Add one h1, the headline of the page.")
    problem = f"{len(headlines)} h1: {_listed(headlines, 3)}" if len(headlines) > 1 else ""
    return _check("one h1", problem, _listed(headlines), "Keep one h1 and turn the others into h2.")


def _heading_order(page: Page) -> Check:
    problems = [f"an h{level} without text" for level, text in page.headings if not text.strip()]
    for (above, _), (level, text) in pairwise(page.headings):
        if level > above + 1:
            problems.append(f"h{above} is followed by h{level} “{' '.join(text.split())[:60]}”")
    otherwise = f"{format_count(len(page.headings), 'heading')}, no level skipped"
    return _check("heading order", _listed(problems, 3), otherwise, "Do not skip levels; give every heading a text.")


def _links(page: Page) -> Check:
    num_empty = sum(not link.strip() for link in page.links)
    num_scripts = sum(link.strip().lower().startswith("javascript:") for link in page.links)
    problems = [f"{num_empty:,} are empty"] if num_empty else []
    problems += [f"{num_scripts:,} run a script (javascript:)"] if num_scripts else []
    problem = f"{_listed(problems)} of {len(page.links):,}" if problems else ""
    return _check("links", problem, f"{len(page.links):,}", "Give each link a URL; use buttons to run scripts.")


def _broken_links(page: Page, exists: Exists) -> Check:
    answers = {link: exists(link) for link in dict.fromkeys(page.links) if link.strip()}
    broken = [link for link, answer in answers.items() if answer is False]
    otherwise = f"the targets of {sum(answer is True for answer in answers.values()):,} links within the site exist"
    problem = f"target missing: {_listed(broken)}" if broken else ""
    return _check("broken links", problem, otherwise, "Correct or remove these links.")


def _image_texts(page: Page) -> Check:
    without = [source for source, text in page.images if text is None]
    problem = f"{len(without):,} of {len(page.images):,} without alt: {_listed(without, 3)}" if without else ""
    advice = 'Describe the image in alt; use alt="" for decoration.'
    return _check("image texts", problem, format_count(len(page.images), "image"), advice)


def _language(page: Page) -> Check:
    lang = (page.lang or "").strip()
    problem = "" if _LANGUAGE.fullmatch(lang) else repr(lang[:40]) if lang else "missing"
    return _check("language", problem, lang, 'Declare the language: <html lang="en">.')


def _canonical(page: Page) -> Check:
    url = (page.canonical or "").strip()
    is_absolute = re.match(r"https?://[^/\s]", url, re.IGNORECASE)
    problem = "" if is_absolute else f"not an absolute URL: {url[:100]}" if url else "missing"
    advice = 'Declare the page\'s own URL: <link rel="canonical" href="https://…">.'
    return _check("canonical", problem, url[:200], advice)


def keyword_check(page: Page, keyword: str) -> Check:
    """Checks where the words of a keyword occur on a page."""
    places = {
        "title": page.title or "",
        "description": page.description or "",
        "h1": " ".join(text for level, text in page.headings if level == 1),
        f"first {FIRST_WORDS} words": first_words(page.text),
    }
    present = [place for place, text in places.items() if contains(text, keyword)]
    absent = [place for place in places if place not in present]
    count, share = frequency(keyword, page.text)
    details = [f"in {', '.join(present)}"] if present else []
    details += [f"not in {', '.join(absent)}"] if absent else []
    if is_stuffed(count, share):
        advice = "Use it less often; it reads as repetition."
    elif "title" not in present or not {"h1", f"first {FIRST_WORDS} words"} & set(present):
        advice = "If the page is about this keyword, use it in the title, and in the h1 or the first words."
    else:
        advice = ""
    occurrences = "; ".join([*details, frequency_text(count, share)])
    return Check(f"keyword: {keyword.strip()}", not advice, occurrences, advice)

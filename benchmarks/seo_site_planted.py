"""Generates a site with planted faults, and the truth about them.

A hobby magazine: 8 topics, 5 things per topic, 7 aspects per thing. A page tells six facts about one aspect of one
thing, each in one of two wordings, between a menu, a sidebar and templates that name the thing. So every page has
neighbours of the same thing, and others with the same sentences about other things. All is a function of the seed.

Planted: the same facts in the other wording and another template (duplicates); pages about something else; several
pages for one query with different facts; mentions of another page's subject without a link; pages that no link
reaches; an older version of the site with other addresses and partly other wordings.
"""

from __future__ import annotations

import html
import random
from dataclasses import dataclass, field
from pathlib import Path

from seo_site_words import (
    ASPECTS,
    DELIVERY,
    FOOTER,
    INTROS,
    NAVIGATION,
    NEWSLETTER,
    OFF_TOPIC,
    OTHER_FOOTER,
    TOPICS,
    USUAL,
)

MENTIONS = (
    "Before you begin, think about {} as well.",
    "A reader wrote to us that {} had kept her busy all weekend.",
    "Some people find {} harder than this.",
    "We were asked about {} at the fair.",
)
Pair = tuple[str, str]


@dataclass
class Truth:
    """What was planted; pages are paths within the site."""

    duplicates: set[Pair] = field(default_factory=set)
    off_topic: set[str] = field(default_factory=set)
    cannibals: set[tuple[str, str]] = field(default_factory=set)
    """Query and page, for each page of a query with several pages."""
    queries: list[str] = field(default_factory=list)
    links: set[Pair] = field(default_factory=set)
    """Source and target of each missing link."""
    unreachable: set[str] = field(default_factory=set)
    topics: dict[str, str] = field(default_factory=dict)
    """The topic of each article."""
    redirects: dict[str, str | None] = field(default_factory=dict)
    """Path on the old site -> page of the new site; None if its content is gone."""


@dataclass
class _Article:
    path: str
    topic: str
    thing: str
    aspect: str
    title: str
    facts: list[str]
    extra: list[str] = field(default_factory=list)
    mentions: list[str] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    template: int = 0


def make_site(folder: Path, old: Path | None = None, seed: int = 0, num_articles: int = 160) -> Truth:
    """Writes the site, and an older version of it if `old` is given."""
    draw, truth = random.Random(seed), Truth()
    everything = [
        (topic, thing, aspect)
        for topic, (things, *_) in TOPICS.items()
        for thing in things.split("|")
        for aspect in ASPECTS
    ]
    draw.shuffle(everything)
    wordings: dict[str, list[list[str]]] = {}
    articles: list[_Article] = []
    for topic, thing, aspect in everything[:num_articles]:
        path = f"{topic}/{thing.replace(' ', '-')}-{aspect}.html"
        wordings[path] = _facts(topic, thing, aspect, draw)
        facts = [draw.choice(pair) for pair in wordings[path]]
        articles.append(_article(path, topic, thing, aspect, 0, facts, draw))
    by_path = {each.path: each for each in articles}
    free = [each.path for each in articles]
    draw.shuffle(free)
    _plant_duplicates(articles, [by_path[free.pop()] for _ in range(num_articles // 10)], wordings, truth, draw)
    rivals = [by_path[free.pop()] for _ in range(num_articles // 12)]
    _plant_rivals(articles, rivals, everything[num_articles:], truth, draw)
    _link(articles, [by_path[free.pop()] for _ in range(10)], truth, draw)
    _plant_mentions(articles, [by_path[path] for path in free], truth, draw)
    truth.topics = {each.path: each.topic for each in articles}
    by_topic = {topic: [each for each in articles if each.topic == topic] for topic in TOPICS}
    for each in articles:
        _write(folder / each.path, each.title, _body(each, draw), each.template)
    sources = [each for each in articles if each.path not in truth.unreachable]
    for number, (title, text) in enumerate(OFF_TOPIC.items()):
        source = sources[number]
        path = f"{draw.choice(list(TOPICS))}/special-{number}.html"
        truth.off_topic.add(path)
        source.links.append((path, "Special"))
        _write(folder / source.path, source.title, _body(source, draw), source.template)
        _write(folder / path, title, f"<h1>{title}</h1>" + "".join(f"<p>{part}.</p>" for part in text.split(". ")), 0)
    for path, (title, text) in USUAL.items():
        _write(folder / f"{path}.html", title, f"<h1>{title}</h1><p>{text}</p>", 0)
    for topic, inside in by_topic.items():
        listed = [each for each in inside if each.path not in truth.unreachable]
        items = "".join(f'<li><a href="/{each.path}">{each.title}</a></li>' for each in listed if not _is_deep(each))
        _write(
            folder / f"{topic}.html", f"{topic.title()}: all articles", f"<h1>{topic.title()}</h1><ul>{items}</ul>", 0
        )
    _write(
        folder / "index.html", "Hobby Quarterly", "<h1>Hobby Quarterly</h1><p>A magazine about eight hobbies.</p>", 0
    )
    if old is not None:
        _write_old(old, articles, wordings, everything[num_articles : num_articles + 15], truth, draw)
    return truth


def write_clicks(file: Path, truth: Truth, seed: int = 0) -> Path:
    """An export of Search Console: the pages of contested queries share the impressions; others get few, far down."""
    draw, rows = random.Random(seed), ["Query,Page,Clicks,Impressions,CTR,Position"]
    pages = sorted(truth.topics)
    for query in truth.queries:
        rivals = sorted(page for each, page in truth.cannibals if each == query) or [draw.choice(pages)]
        shown = [(page, draw.randint(80, 400), draw.uniform(2, 14)) for page in rivals]
        total = sum(number for _, number, _ in shown)
        shown.append((draw.choice(pages), max(1, total // 20), draw.uniform(5, 20)))  # a small share
        shown.append((draw.choice(pages), draw.randint(60, 200), draw.uniform(45, 90)))  # far down
        for page, number, position in shown:
            clicks = int(number * 0.3 / position)
            rows.append(
                f"{query},https://hobby.example/{page},{clicks},{number},{100 * clicks / number:.2f}%,{position:.1f}"
            )
    file.write_text("\n".join(rows) + "\n")
    return file


def _facts(topic: str, thing: str, aspect: str, draw: random.Random) -> list[list[str]]:
    """Both wordings of each fact."""
    _, tools, stuffs, places = TOPICS[topic]
    pairs = []
    for fact in ASPECTS[aspect][3:]:
        place = draw.choice(places.split("|"))
        words = {
            "t": thing, "T": thing.capitalize(), "n": draw.choice((12, 15, 20, 25, 30, 40, 60, 75, 90)),
            "tool": draw.choice(tools.split("|")), "stuff": draw.choice(stuffs.split("|")),
            "place": place, "Place": place.capitalize(),
        }  # fmt: skip
        pairs.append([wording.format(**words) for wording in fact.split("|")])
    return pairs


def _article(
    path: str, topic: str, thing: str, aspect: str, title: int, facts: list[str], draw: random.Random
) -> _Article:
    name = ASPECTS[aspect][title].format(t=thing, T=thing.capitalize())
    draw.shuffle(facts)
    extra = draw.sample(INTROS[topic].split("|"), 2)
    return _Article(path, topic, thing, aspect, name, facts, extra)


def _plant_duplicates(
    articles: list[_Article],
    originals: list[_Article],
    wordings: dict[str, list[list[str]]],
    truth: Truth,
    draw: random.Random,
) -> None:
    for number, each in enumerate(originals):
        facts = [pair[1 - pair.index(fact)] for pair in wordings[each.path] for fact in pair if fact in each.facts]
        path = f"{'print' if number % 2 else each.topic}/{each.thing.split()[0]}-notes-{number}.html"
        copy = _article(path, each.topic, each.thing, each.aspect, 1, facts, draw)
        copy.template = number % 2
        articles.append(copy)
        truth.duplicates.add((min(each.path, path), max(each.path, path)))


def _plant_rivals(
    articles: list[_Article],
    rivals: list[_Article],
    others: list[tuple[str, str, str]],
    truth: Truth,
    draw: random.Random,
) -> None:
    """Splits the facts of some pages over two pages with different titles."""
    doubled = {page for pair in truth.duplicates for page in pair}
    planted = {(each.thing, each.aspect) for each in rivals}
    for number, each in enumerate(rivals):
        half = each.facts[3:]
        each.facts = each.facts[:3]
        path = f"{each.topic}/more-{each.thing.split()[-1]}-{number}.html"
        other = _article(path, each.topic, each.thing, each.aspect, 1, half, draw)
        articles.append(other)
        query = ASPECTS[each.aspect][2].format(t=each.thing)
        truth.queries.append(query)
        truth.cannibals |= {(query, each.path), (query, path)}
    single = [each for each in articles if (each.thing, each.aspect) not in planted and each.path not in doubled]
    for each in draw.sample(single, 30):  # queries with one page
        truth.queries.append(ASPECTS[each.aspect][2].format(t=each.thing))
    existing = {(each.thing, each.aspect) for each in articles}
    for _, thing, aspect in others:  # queries without a page of their own
        if (thing, aspect) not in existing and len(truth.queries) < len(rivals) + 40:
            truth.queries.append(ASPECTS[aspect][2].format(t=thing))
    draw.shuffle(truth.queries)


def _is_deep(article: _Article) -> bool:
    """Whether only another article links to the page, and not the list of its topic."""
    return len(article.path) % 5 == 0


def _link(articles: list[_Article], orphans: list[_Article], truth: Truth, draw: random.Random) -> None:
    truth.unreachable = {each.path for each in orphans}
    for one, other in zip(orphans[:4:2], orphans[1:4:2], strict=True):  # islands: two pages that link to each other
        one.links.append((other.path, "See also"))
        other.links.append((one.path, "See also"))
    reachable = [each for each in articles if each.path not in truth.unreachable]
    shallow = [each for each in reachable if not _is_deep(each)]
    for each in reachable:
        if _is_deep(each):
            draw.choice(shallow).links.append((each.path, each.title))
    for each in orphans:  # orphans do link to others
        each.links.append((draw.choice(reachable).path, "See also"))


def _plant_mentions(articles: list[_Article], free: list[_Article], truth: Truth, draw: random.Random) -> None:
    """Mentions of other pages' titles: some without a link (to be found), some that are links already."""
    doubled = {page for pair in truth.duplicates for page in pair} | {page for _, page in truth.cannibals}
    targets = [each for each in articles if each.path not in doubled and each.path not in truth.unreachable]
    for number in range(len(articles) // 3):
        source = free[number % len(free)]
        target = draw.choice([each for each in targets if each.topic == source.topic and each is not source])
        if any(path == target.path for path, _ in source.links) or (source.path, target.path) in truth.links:
            continue
        anchor = target.title[0].lower() + target.title[1:]
        if number % 2:
            source.links.append((target.path, anchor))
        else:
            source.mentions.append(draw.choice(MENTIONS).format(anchor))
            truth.links.add((source.path, target.path))


def _body(article: _Article, draw: random.Random) -> str:
    facts = [*article.extra, *article.facts, *article.mentions]
    middle = len(facts) // 2
    paragraphs = "".join(f"<p>{html.escape(' '.join(part))}</p>" for part in (facts[:middle], facts[middle:]))
    links = "".join(f'<p>Read on: <a href="/{path}">{html.escape(text)}</a></p>' for path, text in article.links)
    if article.template:
        return f"<h1>{article.title}</h1>{paragraphs}{links}"
    sidebar = NEWSLETTER.format(topic=article.topic)
    return (
        f"<h1>{article.title}</h1>{paragraphs}{links}<p>{DELIVERY.format(t=article.thing)}</p><aside>{sidebar}</aside>"
    )


def _write(file: Path, title: str, body: str, template: int) -> None:
    names = NAVIGATION.split(" ", 9)
    menu = "".join(f'<li><a href="/{name.lower()}.html">{name}</a></li>' for name in names[1:9])
    usual = "".join(f'<a href="/{path}.html">{title}</a> ' for path, (title, _) in USUAL.items())
    head, foot = (f"<nav><ul>{menu}</ul></nav>", f"<footer>{FOOTER} {usual}</footer>")
    if template:
        head, foot = '<p><a href="/index.html">Front page</a></p>', f"<footer>{OTHER_FOOTER}</footer>"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
        f" | Hobby Quarterly</title></head><body>{head}<main>{body}</main>{foot}</body></html>\n"
    )


def _write_old(
    folder: Path,
    articles: list[_Article],
    wordings: dict[str, list[list[str]]],
    gone: list[tuple[str, str, str]],
    truth: Truth,
    draw: random.Random,
) -> None:
    """The older version: other addresses, half of the facts and titles in the other wording, some pages split."""
    doubled = {page for pair in truth.duplicates for page in pair} | {page for _, page in truth.cannibals}
    for number, each in enumerate(articles):
        if each.path in doubled or each.path not in wordings:
            continue
        facts = [pair[draw.randrange(2)] for pair in wordings[each.path]]
        if number % 9 == 0:  # the same address: no redirect is needed
            _write(folder / each.path, each.title, f"<h1>{each.title}</h1><p>{' '.join(facts)}</p>", 1)
            continue
        parts = [facts] if number % 7 else [facts[:3], facts[3:]]  # two old pages became one
        for part, some in enumerate(parts):
            path = f"archive/{number * 37 % 1000:03d}-{part}.html"
            page = _article(path, each.topic, each.thing, each.aspect, number % 2, some, draw)
            _write(folder / path, page.title, f"<h1>{page.title}</h1><p>{' '.join([*page.extra, *some])}</p>", 1)
            truth.redirects[path] = each.path
    for number, (title, text) in enumerate(list(OFF_TOPIC.items())[:3]):  # content that the new site does not have
        text = text.replace(".", ", they say.")
        other = f"archive/gone-{number}.html"
        kept = {
            "Fast payday": "Tax return software",
            "Win big": "Holiday flats in Tuscany",
            "Free spins": "Dog training",
        }
        name = kept.get(" ".join(title.split()[:2]), title)
        text = (
            f"{name}: prices, dates and reviews from readers. {name} was a column of our weekend supplement until 2011."
        )
        _write(folder / other, name, f"<h1>{name}</h1><p>{text}</p>", 1)
        truth.redirects[other] = None
    existing = {(each.thing, each.aspect) for each in articles}
    for number, (topic, thing, aspect) in enumerate(
        gone
    ):  # articles that were dropped, beside similar ones that stayed
        if (thing, aspect) in existing:
            continue
        facts = [draw.choice(pair) for pair in _facts(topic, thing, aspect, draw)]
        page = _article(f"archive/dropped-{number}.html", topic, thing, aspect, 0, facts, draw)
        _write(folder / page.path, page.title, f"<h1>{page.title}</h1><p>{' '.join([*page.extra, *facts])}</p>", 1)
        truth.redirects[page.path] = None

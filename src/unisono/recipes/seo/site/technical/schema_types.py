"""Fields that search engines require of common schema.org types before they show a rich result.

The fields are those of the search engines' public documentation of rich results. A group contains alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unisono.recipes.seo.site.finding import Finding
from unisono.recipes.seo.site.technical.page_facts import PageFacts
from unisono.recipes.seo.site.technical.structured import Item


@dataclass(frozen=True)
class Fields:
    """Required and recommended fields of a type."""

    required: tuple[tuple[str, ...], ...] = ()
    """Groups of fields; an item needs at least one field of each group."""
    recommended: tuple[str, ...] = ()


def _fields(required: str, recommended: str = "") -> Fields:
    return Fields(tuple(tuple(group.split("|")) for group in required.split()), tuple(recommended.split()))


_ARTICLE = _fields("headline", "image datePublished author")
_BUSINESS = _fields("name address", "telephone openingHoursSpecification geo")

TYPES = {
    "Article": _ARTICLE,
    "NewsArticle": _ARTICLE,
    "BlogPosting": _ARTICLE,
    "BreadcrumbList": _fields("itemListElement"),
    "Course": _fields("name description", "provider"),
    "Dataset": _fields("name description", "license creator"),
    "Event": _fields("name startDate location", "endDate offers image"),
    "FAQPage": _fields("mainEntity"),
    "HowTo": _fields("name step"),
    "ImageObject": _fields("contentUrl|url", "license creditText"),
    "ItemList": _fields("itemListElement"),
    "JobPosting": _fields(
        "title description datePosted hiringOrganization jobLocation|applicantLocationRequirements", "validThrough"
    ),
    "ListItem": _fields("position"),
    "LocalBusiness": _BUSINESS,
    "Store": _BUSINESS,
    "Restaurant": _fields("name address", "servesCuisine telephone"),
    "Offer": _fields("price|priceSpecification", "priceCurrency availability"),
    "AggregateOffer": _fields("lowPrice priceCurrency"),
    "Organization": _fields("name", "url logo"),
    "Person": _fields("name"),
    "Product": _fields("name offers|review|aggregateRating", "image description brand"),
    "Question": _fields("name acceptedAnswer|suggestedAnswer"),
    "Answer": _fields("text"),
    "Recipe": _fields("name image", "recipeIngredient recipeInstructions totalTime"),
    "Review": _fields("author reviewRating", "datePublished"),
    "AggregateRating": _fields("ratingValue ratingCount|reviewCount"),
    "Rating": _fields("ratingValue"),
    "SoftwareApplication": _fields("name offers|aggregateRating|review", "operatingSystem applicationCategory"),
    "VideoObject": _fields("name thumbnailUrl uploadDate", "description contentUrl duration"),
    "WebSite": _fields("name|url"),
}
"""Required and recommended fields, by type."""


_NESTED = ("Offer", "AggregateOffer", "Review", "AggregateRating", "Rating", "ListItem", "Question", "Answer")
"""Types that are checked even as values of other items. A value of any other type may refer to an item elsewhere."""


def check_items(page: PageFacts) -> Iterator[Finding]:
    """Yields findings about the structured data of a page."""
    for problem in dict.fromkeys(page.items.problems):
        fix = "Correct the structured data; search engines ignore a block that they cannot parse."
        yield Finding("invalid structured data", "error", page.name, problem, fix, problem[:60])
    reported = set[tuple[str, str]]()
    for item in page.items.items:
        name = next((each for each in item.types if each in TYPES), "")
        if not name or (item.nested and name not in _NESTED):
            continue
        for subject, severity, absent in _absent(name, item):
            if (subject, absent) not in reported:
                reported.add((subject, absent))
                word = "requires" if severity == "error" else "recommends"
                fix = f"Add {absent}, or remove the {item.syntax}." if severity == "error" else f"Add {absent}."
                kind = f"structured data: {'required' if severity == 'error' else 'recommended'} field missing"
                evidence = f"{item.syntax} of type {name} {word} {absent}"
                yield Finding(kind, severity, page.name, evidence, fix, f"{name} {subject}")


def _absent(name: str, item: Item) -> Iterator[tuple[str, str, str]]:
    """Yields subject, severity and names of the missing fields of an item."""
    if "@id" in item.fields and item.fields <= {"@type", "@id"}:  # only refers to another item
        return
    for group in TYPES[name].required:
        if not set(group) & item.fields:
            yield " or ".join(group), "error", " or ".join(group)
    if not item.nested and (recommended := [each for each in TYPES[name].recommended if each not in item.fields]):
        yield "recommended", "notice", ", ".join(recommended)

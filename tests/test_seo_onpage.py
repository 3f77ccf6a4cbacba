"""Page rules find exactly the defects of a page, and duplicate pages are detected."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from unisono.recipes.seo.data.pages import Page, parse_page
from unisono.recipes.seo.site.duplicates import Duplicates
from unisono.recipes.seo.site.page_rules import check_page
from unisono.recipes.seo.site.pages import open_site
from unisono.recipes.seo.site.text_rules import Check, check_text, num_sentences, num_syllables, reading_ease, words_of

WORDS = (
    "soil",
    "water",
    "seeds",
    "plant",
    "roots",
    "tomato",
    "basil",
    "compost",
    "mulch",
    "sun",
    "shade",
    "rain",
    "bees",
)
PROSE = " ".join(["The cat sat on the mat."] * 25)
GOOD = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Growing tomatoes</title>
<meta name="description" content="Tomatoes on a balcony."><link rel="canonical" href="https://a.example/tomatoes">
</head><body><h1>Tomatoes</h1><p>{PROSE}</p><h2>Soil</h2><h3>Compost</h3><h2>Water</h2>
<a href="#soil">Soil</a> <img src="x.png" alt=""> <img src="y.png" alt="A tomato"></body></html>"""


def checks_of(html: str, *keywords: str) -> dict[str, Check]:
    return {check.name: check for check in check_page(parse_page(html, "a.html"), keywords)}


def failing(html: str, *keywords: str) -> set[str]:
    return {name for name, check in checks_of(html, *keywords).items() if check.failed}


def prose(number: int, seed: int) -> str:
    drawn = random.Random(seed)
    return " ".join(drawn.choice(WORDS) for _ in range(number))


def test_a_good_page_passes_all_checks_and_passed_checks_give_no_advice() -> None:
    checks = checks_of(GOOD)
    assert {name for name, check in checks.items() if not check.passed} == set()
    assert all(check.found and not check.advice for check in checks.values())


@pytest.mark.parametrize(
    ("old", "new", "name", "found"),
    [
        ("<title>Growing tomatoes</title>", "", "title", "missing"),
        ("Growing tomatoes", "  ", "title", "empty"),
        ("Growing tomatoes", "x" * 61, "title", "61 characters"),
        ('content="Tomatoes on a balcony."', f'content="{"y" * 156}"', "description", "156 characters"),
        ('content="Tomatoes on a balcony."', 'content=""', "description", "empty"),
        ('name="description"', 'name="other"', "description", "missing"),
        ("<h1>Tomatoes</h1>", "", "one h1", "no h1"),
        ("<h2>Soil</h2>", "<h1>Soil</h1><h2>x</h2>", "one h1", "2 h1: Tomatoes; Soil"),
        ("<h2>Soil</h2>", "", "heading order", "h1 is followed by h3 “Compost”"),
        ("<h2>Water</h2>", "<h2> </h2>", "heading order", "an h2 without text"),
        ('href="#soil"', 'href=" "', "links", "1 are empty of 1"),
        ('href="#soil"', 'href="JavaScript:go()"', "links", "1 run a script"),
        ('<img src="x.png" alt="">', '<img src="x.png">', "image texts", "1 of 2 without alt: x.png"),
        (PROSE, "The cat sat on the mat.", "text length", "words"),
        ('lang="en"', "", "language", "missing"),
        ('lang="en"', 'lang="my own"', "language", "'my own'"),
        ('<link rel="canonical" href="https://a.example/tomatoes">', "", "canonical", "missing"),
        ("https://a.example/tomatoes", "/tomatoes", "canonical", "not an absolute URL: /tomatoes"),
        ("<h1>", "</b><h1>", "HTML", "end tags without a start tag"),
    ],
)
def test_each_defect_fails_its_own_check_with_advice(old: str, new: str, name: str, found: str) -> None:
    assert old in GOOD
    check = checks_of(GOOD.replace(old, new))[name]
    assert check.failed and found in check.found and check.advice
    assert failing(GOOD.replace(old, new)) == {name}


def test_lengths_at_the_limit_pass() -> None:
    page = GOOD.replace("Growing tomatoes", "x" * 60).replace("Tomatoes on a balcony.", "y" * 155)
    assert failing(page) == set()


def test_a_page_with_ten_thousand_faults_is_summarised_in_one_line() -> None:
    page = GOOD.replace('<img src="x.png" alt="">', '<img src="data:image/png;base64,AAAA' + "A" * 500 + '">' * 10_000)
    check = checks_of(page)["image texts"]
    assert check.failed and len(check.found) < 500


def test_keywords_match_whole_words_anywhere() -> None:
    check = checks_of(GOOD, "Growing TOMATOES")["keyword: Growing TOMATOES"]
    assert check.failed  # only `Tomatoes` is in the h1, and `growing` is nowhere else
    assert check.found == "in title; not in description, h1, first 100 words; 0 times, 0.0 % of the words"
    assert checks_of(GOOD, "tomatoes")["keyword: tomatoes"].passed
    assert checks_of(GOOD, "tomato")["keyword: tomato"].failed  # no stemming
    assert checks_of(GOOD, "cat sat")["keyword: cat sat"].found.startswith("in first 100 words; not in title")
    assert "25 times" in checks_of(GOOD, "cat sat")["keyword: cat sat"].found
    assert [name for name in checks_of(GOOD, " ", "?") if name.startswith("keyword")] == []


NOT_ENGLISH = {
    "German": "Entkalken Sie den Kessel mit Essig. Das Wasser wird heiß und kocht. Danach ist er sauber und trocken. ",
    "French": "Remplissez la bouilloire avec du vinaigre. Rincez deux fois. Le filtre est dans le bec. ",
    "Spanish without accents": "Llena la tetera con vinagre y agua. Hierve durante veinte minutos y enjuaga. ",
    "Finnish": "Täytä vedenkeitin etikalla ja vedellä. Keitä kaksikymmentä minuuttia ja huuhtele hyvin. ",
    "Russian": "Наполните чайник уксусом и водой. Кипятите двадцать минут. ",
    "Chinese": "用醋和水装满水壶。煮二十分钟然后冲洗两次。",
}


@pytest.mark.parametrize("language", NOT_ENGLISH)
def test_a_text_in_another_language_gets_no_english_reading_score(language: str) -> None:
    check = next(check for check in check_text(NOT_ENGLISH[language] * 5) if check.name == "readability")
    assert check.passed is None and "the text is not in English" in check.found


def test_terse_english_without_function_words_is_recognised() -> None:
    terse = "Boil kettle. Add vinegar. Wait twenty minutes. Rinse twice. Dry kettle. Repeat monthly. Avoid bleach. " * 3
    assert next(check for check in check_text(terse) if check.name == "readability").passed is not None


def test_a_keyword_used_too_often_is_reported_as_repetition() -> None:
    stuffed = GOOD.replace(PROSE, "Tomatoes are tomatoes and so tomatoes. " * 30)
    assert "less often" in checks_of(stuffed, "tomatoes")["keyword: tomatoes"].advice


def test_readability_matches_the_flesch_formula_and_is_only_for_english() -> None:
    text = "The cat sat on the mat. The water is cold."  # 10 words, 2 sentences, 11 syllables
    assert reading_ease(text) == pytest.approx(206.835 - 1.015 * 10 / 2 - 84.6 * 11 / 10)
    hard = "Organisational considerations necessitate comprehensive administrative interpretation. " * 20
    assert checks_of(GOOD.replace(PROSE, hard))["readability"].failed
    german = checks_of(GOOD.replace(PROSE, hard).replace('lang="en"', 'lang="de"'))["readability"]
    assert german.passed is None and not german.failed and "for English" in german.found and "'de'" in german.found
    assert checks_of(GOOD.replace('lang="en"', 'lang="en-GB"'))["readability"].passed
    # A menu is not prose, so it does not make a difficult page look easy.
    menu = "".join(f"<li>Item {number}</li>" for number in range(300))
    assert checks_of(GOOD.replace(PROSE, hard + f"</p><ul>{menu}</ul><p>"))["readability"].failed


def test_syllables_are_counted_approximately() -> None:
    known = {
        1: "the cat dogs strength make takes liked jumped house great friend time page world cause rules",
        2: "table tables water open little people useful likely wanted boxes changes being going garden nation special",
        3: "video radio media completely beautiful family important example computer element following industry",
        4: "information application especially available community technology category environment",
        5: "university opportunity electricity international representative",
    }
    wrong = {word: num_syllables(word) for number, words in known.items() for word in words.split()
             if num_syllables(word) != number}  # fmt: skip
    assert wrong == {}
    assert num_syllables("2024") == num_syllables("мир") == 1


def test_sentence_boundaries_are_detected() -> None:
    assert num_sentences("One. Two! Three?") == 3
    assert num_sentences("Version 2.13 of a.example is here.") == 1
    assert num_sentences("A heading\n\nA sentence") == 2
    assert num_sentences('He said "stop." She did.') == 2
    assert num_sentences("") == 1


def test_words_of_any_script_are_recognised() -> None:
    assert words_of("Don't stop: Café-Bar") == ["don't", "stop", "café", "bar"]
    assert words_of("日本語 text") == ["日", "本", "語", "text"]


def test_plain_text_is_checked_too() -> None:
    checks = {check.name: check for check in check_text(PROSE, ["cat", "dog"])}
    assert checks["text length"].passed and checks["readability"].passed
    assert checks["keyword: cat"].failed and "less often" in checks["keyword: cat"].advice  # one word in six
    assert checks["keyword: dog"].failed and "not in the first 100 words; 0 times" in checks["keyword: dog"].found
    assert [check.passed for check in check_text("")] == [False, None]


def test_only_links_within_the_site_are_checked(tmp_path: Path) -> None:
    (tmp_path / "site" / "blog").mkdir(parents=True)
    (tmp_path / "outside.html").write_text(GOOD)
    for name in ("about.html", "blog/index.html", "ä b.html"):
        (tmp_path / "site" / name).write_text(GOOD)
    page = tmp_path / "site" / "blog" / "a.html"
    page.write_text("<p>x</p>")
    site = open_site(str(tmp_path / "site"))
    exists = site.exists_from(page)
    assert exists is not None
    there = ["/about.html", "../about", "../about.html?x=1#y", "index.html", "/blog/", "/blog", "/%C3%A4%20b.html", "."]
    assert {link: exists(link) for link in there} == dict.fromkeys(there, True)
    gone = ["gone.html", "/gone/", "/..%2foutside.html", "/%2e%2e/outside.html", "a%00b", "x" * 999]
    assert {link: exists(link) for link in gone} == dict.fromkeys(gone, False)
    elsewhere = ["https://a.example/", "//a.example/x", "mailto:a@b.example", "#top", "?page=2", "tel:1", "data:,x"]
    # Files above the folder are not checked: they may exist or not.
    elsewhere += ["../../outside.html", "../../gone.html", "..%2f..%2foutside.html", "../%2e%2e/gone.html"]
    assert {link: exists(link) for link in elsewhere} == dict.fromkeys(elsewhere, None)
    links = Page("a", links=["/about.html", "gone.html", "https://a.example/"])
    check = next(check for check in check_page(links, exists=exists) if check.name == "broken links")
    assert check.failed and check.found == "target missing: gone.html"


def test_duplicate_pages_are_found() -> None:
    duplicates = Duplicates()
    texts = [prose(300, 1), prose(300, 2), prose(300, 1).upper(), prose(300, 3)]
    texts.append(texts[1].replace(" soil ", " ", 3))  # a few words differ
    texts.append(texts[1][: len(texts[1]) // 2] + prose(150, 9))  # half of the text is different
    for number, text in enumerate(texts):
        title = "The same" if number in (0, 3) else f"Title {number}"
        title, description = title.upper() if number else title, "D" if number < 2 else ""
        duplicates.add(Page(str(number), title=title, description=description, text=text))
    assert duplicates.same_texts() == [[0, 2]]
    assert duplicates.same_titles() == [[0, 3]] and duplicates.same_descriptions() == [[0, 1]]
    [(pages, share)] = duplicates.near_duplicates()
    assert pages == [1, 4] and 0.8 <= share < 1


def test_pages_with_the_same_canonical_url_are_not_duplicates() -> None:
    duplicates = Duplicates()
    for canonical in ("https://a.example/1", "https://a.example/1", None, ""):
        duplicates.add(Page("x", title="T", text=prose(100, 1), canonical=canonical))
    assert duplicates.same_titles() == duplicates.same_texts() == [[0, 2, 3]]  # page 1 declares page 0 as canonical


def test_empty_pages_are_not_duplicates_of_each_other() -> None:
    duplicates = Duplicates()
    for _ in range(3):
        duplicates.add(Page("x", title=" ", description="", text="  \n"))
    assert (duplicates.same_titles(), duplicates.same_texts(), duplicates.near_duplicates()) == ([], [], [])


def test_the_similarity_of_two_texts_is_estimated_closely() -> None:
    first = [f"word{number}" for number in range(1000)]
    for changed in (50, 100):  # at one end, which changes this many five-word shingles
        duplicates = Duplicates()
        duplicates.add(Page("a", text=" ".join(first)))
        duplicates.add(Page("b", text=" ".join([*first[changed:], *(f"other{number}" for number in range(changed))])))
        [(_, share)] = duplicates.near_duplicates()
        assert share == pytest.approx((996 - changed) / (996 + changed), abs=0.08)


def test_thousands_of_pages_of_one_template_take_seconds() -> None:
    duplicates, template = Duplicates(), prose(60, 0)
    began = time.process_time()
    for number in range(2000):
        duplicates.add(Page(str(number), text=f"{template} {prose(40, number + 1 if number != 1999 else 7)}"))
    groups = duplicates.near_duplicates()
    assert time.process_time() - began < 10
    assert duplicates.same_texts() == [[6, 1999]] and groups == []

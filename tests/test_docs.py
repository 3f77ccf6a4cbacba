"""The documentation site builds without a warning, has no dead link, documents every setting and can be searched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import unisono
import unisono.multi_gpu
import unisono.ray
from browser import CHROMIUM, Browser
from unisono.cli.main import COMMANDS
from unisono.config.fields import fields_of
from unisono.engine.start.registry import BUILT_IN, load_recipe
from unisono.settings import Settings

ROOT = Path(__file__).parent.parent

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := values.get(name))]
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}


def test_the_site_has_no_dead_link_and_loads_nothing_from_the_network(site: Path) -> None:
    pages = {path: _Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 60
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"https?:", target):
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            if not file.exists() or (anchor and file in pages and unquote(anchor) not in pages[file].anchors):
                dead.append((str(path.relative_to(site)), link))
    assert dead == []
    # Links that a reader may click are fine; what a page loads by itself is not.
    loaded = [
        tag for path in pages for tag in re.findall(r"<(?:script|link|img)[^>]+https?://[^>]+>", path.read_text())
    ]
    assert loaded == []


def test_every_setting_and_command_is_in_the_command_line_reference(site: Path) -> None:
    page = _Page((site / "reference/train.html").read_text())
    names = {field.name for field in fields_of(Settings)}
    assert len(names) > 60 and names <= page.anchors
    for recipe in BUILT_IN:
        page = _Page((site / f"reference/{recipe}.html").read_text())
        assert {field.name for field in fields_of(load_recipe(recipe).Config)} - names <= page.anchors, recipe
    page = _Page((site / "reference/index.html").read_text())
    assert {f"unisono-{command}" for command in COMMANDS} <= page.anchors


def test_every_public_name_is_in_the_python_api(site: Path) -> None:
    page = _Page((site / "reference/python.html").read_text())
    for module in (unisono, unisono.ray, unisono.multi_gpu):
        for name in module.__all__:
            if not name.startswith("_"):
                public = getattr(module, name)
                assert f"{public.__module__}.{public.__qualname__}" in page.anchors, name
    assert "unisono.engine.recipe.Recipe.loss" in page.anchors


def test_a_section_of_the_navigation_lists_all_its_pages(site: Path) -> None:
    page = _Page((site / "index.html").read_text())
    pages = ["get_started", "own_model", "examples/own_model/index", "darkroom", "wan", "wan_distill", "clips", "seo"]
    pages += [
        "plan",
        "small_cards",
        "clusters",
        "faults",
        "reference/index",
        "reference/python",
        "architecture",
        "benchmarks",
    ]
    assert {f"{name}.html" for name in pages} <= set(page.links)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_search_works_without_a_server(site: Path, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        browser("Page.navigate", url=(site / "index.html").as_uri())
        browser.wait("document.readyState === 'complete' && typeof __index === 'object'")
        browser.ask("document.querySelector('#__search').click(); document.querySelector('.md-search__input').focus()")
        browser("Input.insertText", text="gradient_accumulation_steps")
        links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        browser.wait(f"{links}.length > 0")
        results: list[str] = browser.ask(links)
        assert any("reference/train.html" in link for link in results), results
    finally:
        browser.close()

"""Maps files of the repository to pages of the site, and rewrites links between them."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

_LINK = re.compile(r"(!?\[[^\]]*\])\(<?([^)\s>]+?)(#[^)\s>]*)?>?\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".sh": "bash", ".slurm": "bash", ".yaml": "yaml", ".json": "json", ".css": "css"}
_LARGEST_LISTING = 100_000
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


class Repository:
    """The repository's Markdown pages and listed files, by their addresses on the site."""

    def __init__(self, root: Path) -> None:
        self._root = root
        pages = [
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            *self._glob("docs/**/*.md"),
            *self._glob("benchmarks/*.md"),
        ]
        pages += [*self._glob("benchmarks/results/*.md"), *self._glob("examples/**/*.md")]
        self._uri_of = {path: _page_uri(path) for path in pages}
        for path in self._linked_files():
            self._uri_of[path] = f"files/{path}.md"
        self._path_of = {uri: path for path, uri in self._uri_of.items()}

    def pages(self) -> dict[str, str]:
        """Maps addresses to the Markdown of pages whose files are outside docs/."""
        outside = {path: uri for path, uri in self._uri_of.items() if not path.startswith("docs/") or uri != path[5:]}
        pages = {uri: self._text(path, uri) for path, uri in outside.items()}
        pages["benchmarks/index.md"] += self._list_of_results()
        return pages

    def with_site_links(self, markdown: str, uri: str) -> str:
        """The page with its links to files of the repository turned into links to pages of the site."""
        path = self._path_of.get(uri)
        if path is None or uri.startswith("files/"):
            return markdown
        code: list[str] = []

        def hide(match: re.Match[str]) -> str:
            code.append(match[0])
            return f"\0{len(code) - 1}\0"

        hidden = _FENCE.sub(hide, markdown)
        linked = _LINK.sub(lambda match: self._site_link(match, path, uri), hidden)
        return re.sub("\0(\\d+)\0", lambda match: code[int(match[1])], linked)

    def _site_link(self, match: re.Match[str], path: str, uri: str) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        resolved = _resolve(path, target)
        page = self._uri_of.get(resolved) or self._uri_of.get(f"{resolved}/README.md")
        if page is None and resolved.startswith("docs/"):
            page = resolved.removeprefix("docs/")  # an image
        if page is None:
            return (
                label.strip("![]") if (self._root / resolved).exists() else match[0]
            )  # a dead link, for the strict build
        return f"{label}({os.path.relpath(page, PurePosixPath(uri).parent)}{anchor})"

    def _linked_files(self) -> list[str]:
        """Files that are not pages but that a page links to."""
        linked: set[str] = set()
        for path in self._uri_of:
            text = _FENCE.sub("", (self._root / path).read_text())
            linked |= {_resolve(path, match[2]) for match in _LINK.finditer(text) if ":" not in match[2]}
        known = {path for path in linked if path in self._uri_of or path.startswith("docs/")}
        files = [path for path in linked - known if (self._root / path).is_file()]
        return sorted(path for path in files if (self._root / path).stat().st_size <= _LARGEST_LISTING)

    def _text(self, path: str, uri: str) -> str:
        text = (self._root / path).read_text()
        if not uri.startswith("files/"):
            return text
        fence = "`" * 6  # longer than any inside
        language = _LANGUAGES.get(Path(path).suffix, "text")
        return f"{_NOT_SEARCHED}# `{path}`\n\n{fence}{language}\n{text}\n{fence}\n"

    def _list_of_results(self) -> str:
        lines = ["\n\n## All results\n"]
        for path in self._glob("benchmarks/results/*.md"):
            title = (self._root / path).read_text().splitlines()[0].lstrip("# ")
            lines.append(f"- [{title}](results/{Path(path).name})")
        return "\n".join(lines) + "\n"

    def _glob(self, pattern: str) -> list[str]:
        return sorted(path.relative_to(self._root).as_posix() for path in self._root.glob(pattern))


def _page_uri(path: str) -> str:
    names = {"README.md": "index.md", "benchmarks/README.md": "benchmarks/index.md"}
    return names.get(path, path.removeprefix("docs/"))


def _resolve(page: str, target: str) -> str:
    """The target of a link on a page, relative to the repository's root."""
    return os.path.normpath(PurePosixPath(page).parent / target.split("#")[0])

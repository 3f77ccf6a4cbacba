"""MkDocs hooks: add generated pages, and turn links to files of the repository into links to pages.

The Markdown in docs/ stays readable in the repository: it links to other files there (`../examples/own_model`). On the
site each of those files is a page: a README as it is, any other file as a listing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))

import reference
from repository import Repository

_repository = Repository(Path(__file__).resolve().parents[2])


def on_files(files: Any, config: Any) -> Any:
    """Adds pages from outside docs/: READMEs, results, listings, and the reference."""
    for uri, text in {**_repository.pages(), **reference.pages()}.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links to files of the repository into links to their pages."""
    return _repository.with_site_links(markdown, page.file.src_uri)

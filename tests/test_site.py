"""The documentation's site: `make docs` builds it, then runs this.

MkDocs itself has warned of links in pages' sources that lead nowhere, and `make
docs` has ended there. These tests read what it made.
"""

import html.parser
import os
import pathlib
import urllib.parse
import zlib

import pytest

from documentation import public_names

#: The site's folder. Without one there is nothing to test.
FOLDER = os.environ.get("TFRS_EMBED_SITE")
pytestmark = pytest.mark.skipif(not FOLDER, reason="make docs runs it")

#: What browsers fetch to show a page: attributes of these.
_FETCHED = {"audio", "embed", "iframe", "img", "link", "script", "source"}


class _Page(html.parser.HTMLParser):
    """A page's links, what it fetches, and its parts that links can name."""

    def __init__(self, path):
        super().__init__()
        self.links, self.fetched, self.parts = [], [], {""}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        address = attributes.get("href") or attributes.get("src")
        if address is not None:
            self.links.append(address)
            if tag in _FETCHED:
                self.fetched.append(address)
        self.parts |= {attributes.get("id"), attributes.get("name")}


@pytest.fixture(scope="module")
def pages():
    paths = pathlib.Path(FOLDER).rglob("*.html")
    found = {path.resolve(): _Page(path) for path in paths}
    # Its addresses are those of a server's root.
    del found[pathlib.Path(FOLDER, "404.html").resolve()]
    return found


def test_links_lead_somewhere(pages):
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            address = urllib.parse.urlsplit(link)
            if address.scheme or address.netloc:
                continue
            named = urllib.parse.unquote(address.path)
            target = (path.parent / named).resolve() if named else path
            part = urllib.parse.unquote(address.fragment)
            known = pages[target].parts if target in pages else {"", part}
            if not target.is_file() or part not in known:
                wrong.append((path.name, link))
    assert not wrong
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_nothing_is_fetched_from_elsewhere(pages):
    for path, page in pages.items():
        for address in page.fetched:
            assert not urllib.parse.urlsplit(address).netloc, (path, address)
    for path in pathlib.Path(FOLDER).rglob("*.css"):
        text = path.read_text("utf-8")
        assert "url(http" not in text and "url(//" not in text, path


def test_the_reference_has_all_public_names():
    """In Sphinx's format of names and addresses."""
    content = pathlib.Path(FOLDER, "objects.inv").read_bytes()
    *_, packed = content.split(b"\n", 4)
    names = {line.split()[0] for line in zlib.decompress(packed).splitlines()}
    # The package itself has the reference's first page.
    wanted = {name.encode() for name in public_names()} - {b"tfrs_embed"}
    assert wanted <= names, (
        "a page of docs/reference must have ::: and each of these: "
        f"{sorted(wanted - names)}"
    )


def test_tests_comments_are_not_on_it(pages):
    for path in pages:
        assert "run first:" not in path.read_text("utf-8"), path


def test_it_can_be_searched():
    text = pathlib.Path(FOLDER, "search/search_index.json").read_text("utf-8")
    for word in ("PartialTPUEmbedding", "size_threshold", "NUMA"):
        assert word in text

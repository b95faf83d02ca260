"""What the documentation site needs beside MkDocs' plugins.

MkDocs runs the functions `on_...`: pages may link to the repository's files,
and lose what their sources say to the tests. Griffe, which reads the public
names' docstrings, runs `Docstrings`.
"""

import inspect
import os
import pathlib
import re

import griffe
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Files of the repository that are pages of the site, whoever links to them.
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md")
#: The folder of the site with the repository's files.
SOURCE = "source"
LANGUAGES = {".cc": "cpp", ".py": "python", ".sh": "bash", ".yaml": "yaml"}

_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
_FETCHED = '"https://unpkg.com/iframe-worker/shim"'
_CALL = re.compile(r"^(Call arguments):\n((?:    .*\n|\n)+)", re.MULTILINE)
#: Methods that Keras calls, and nobody else.
_OF_KERAS = (
    "build_from_config",
    "from_config",
    "get_build_config",
    "load_own_variables",
    "save_own_variables",
)
_LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )([^)\s#:]+)", re.MULTILINE)


def links(text):
    """The relative paths that a page links to."""
    return {path for _, path in _LINK.findall(text)}


def linked_files(paths):
    """The repository's files outside of docs/ that these pages link to.

    Args:
        paths: the pages' paths in the repository.
    """
    found, waiting = set(), list(paths)
    while waiting:
        page = waiting.pop()
        for link in links((ROOT / page).read_text("utf-8")):
            path = os.path.normpath(os.path.join(os.path.dirname(page), link))
            # MkDocs warns of files that aren't there.
            outside = not path.startswith(("docs/", ".."))
            if outside and path not in found and (ROOT / path).is_file():
                found.add(path)
                if path.endswith(".md"):
                    waiting.append(path)
    return found


def page_of(path):
    """The page of the site, in docs/, that stands for the repository's file."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SOURCE}/{path}" + ("" if path.endswith(".md") else ".md")


def on_files(files, config):
    """Makes pages of the repository's files that pages link to."""
    pages = [f"docs/{f.src_uri}" for f in files if f.is_documentation_page()]
    for path in sorted(linked_files([*pages, *PAGES]) | set(PAGES)):
        text = (ROOT / path).read_text("utf-8")
        if not path.endswith(".md"):
            language = LANGUAGES.get(pathlib.Path(path).suffix, "text")
            text = f"{_NOT_SEARCHED}# `{path}`\n\n````{language}\n{text}````\n"
        elif path == "README.md":  # The pages say the same, and more.
            text = _NOT_SEARCHED + text
        files.append(File.generated(config, page_of(path), content=text))
    return Files(list(files))


def on_page_markdown(markdown, page, config, files):
    """Takes out what is for the tests, and leads links to the site's pages."""
    of_repository = page.file.src_uri.removeprefix(f"{SOURCE}/")
    if of_repository == page.file.src_uri:
        of_repository = f"docs/{of_repository}"
    folder, site_folder = map(
        os.path.dirname, (of_repository, page.file.src_uri)
    )

    def lead(match):
        before, link = match.groups()
        path = os.path.normpath(os.path.join(folder, link))
        if not (ROOT / path).is_file():
            return match[0]
        return before + os.path.relpath(page_of(path), site_folder or ".")

    if page.file.src_uri.startswith(SOURCE) and "````" in markdown:
        return markdown
    return _LINK.sub(lead, _COMMENT.sub("", markdown))


def on_post_page(output, page, config):
    """Takes a script from the site that Material would fetch from unpkg."""
    assert output.count(_FETCHED) == 1, "Material has another script"
    depth = page.file.dest_uri.count("/")
    return output.replace(_FETCHED, f'"{"../" * depth}javascripts/worker.js"')


def _as_list(match):
    """A section of arguments that griffe has no name for, as a list."""
    head, body = match.groups()
    body = re.sub(r"^    (?=\S)", "", body, flags=re.MULTILINE)
    body = re.sub(r"^(\w+): ", r"- **`\1`**: ", body, flags=re.MULTILINE)
    body = re.sub(r"^ +(?=\S)", "    ", body, flags=re.MULTILINE)
    return f"**{head}:**\n\n{body}"


class Docstrings(griffe.Extension):
    """Finds the documentation that is not in a docstring of its own.

    And what griffe knows by another name, or by none.
    """

    def on_instance(self, *, node, obj, agent, **kwargs):
        """Has examples shown as code, and the arguments of calls as a list."""
        if obj.docstring is not None:
            value = inspect.cleandoc(obj.docstring.value)
            value = re.sub(r"^Example:$", "Examples:", value, flags=re.M)
            obj.docstring.value = _CALL.sub(_as_list, value)

    def on_class_members(self, *, node, cls, agent, **kwargs):
        """Leaves out what only Python or Keras calls."""
        for name in list(cls.members):
            special = re.fullmatch("__.*__", name) and name != "__init__"
            if special or name in _OF_KERAS:
                del cls.members[name]

    def on_attribute_instance(self, *, node, attr, agent, **kwargs):
        """Takes the comment `#: ...` above an attribute."""
        if attr.docstring is not None:
            return
        lines = attr.filepath.read_text("utf-8").splitlines()
        found = []
        for line in reversed(lines[: attr.lineno - 1]):
            if not line.strip().startswith("#:"):
                break
            found.insert(0, line.strip().removeprefix("#:").strip())
        if found:
            attr.docstring = griffe.Docstring("\n".join(found), parent=attr)

    def on_package(self, *, pkg, loader, **kwargs):
        """Gives a Keras's layers the docstrings of their bodies."""
        for module in ("keras2", "keras3"):
            for layer in pkg["layers"][module].classes.values():
                bodies = (b for b in layer.mro() if b.docstring is not None)
                body = next(bodies, None)
                if layer.docstring is None and body is not None:
                    layer.docstring = griffe.Docstring(
                        body.docstring.value, parent=layer
                    )

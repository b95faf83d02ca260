"""Code in the documentation: blocks of pages, examples of public names.

HTML comments in a page's source, which nobody sees in its text, say how the
next ```python block runs:

    <!-- not run: REASON -->
    <!-- run on PLACE -->   one of PLACES
    <!-- run on PLACE, after the blocks above -->   all of the page's that run
        in any process

Pages have no hidden code: a block runs after those that the page shows above
it, with the names that these define. Examples in docstrings may use the names
in `IMPORTS` without importing them.
"""

import contextlib
import dataclasses
import doctest
import functools
import inspect
import io
import pathlib
import re

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import tfrs_embed
from tfrs_embed.compat.strategies import NO_SPARSE_CORES

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
IMPORTS = {
    "keras": keras,
    "np": np,
    "tf": tf,
    "tf_keras": tf_keras,
    "tfrs_embed": tfrs_embed,
}

#: Where code may run: in any process, on an emulated slice of four chips, on
#: replicas of one process, or in each of several workers.
ANYWHERE, SLICE, REPLICAS, WORKERS = (
    "any process",
    "slice",
    "replicas",
    "workers",
)
PLACES = (SLICE, REPLICAS, WORKERS)

#: Examples that run on an emulated slice.
ON_SLICE = ("tfrs_embed.testing", "tfrs_embed.testing.EmulatedTPUStrategy")
#: Examples that need TensorFlow's wheel for TPUs, those of one report: that of
#: the first.
ON_TPU_WHEEL = tuple(
    f"tfrs_embed.tpu_check.{name}"
    for name in (
        "check",
        "CheckError",
        "CheckedFunction",
        "CheckedProgram",
        "Compiled",
        "Program",
        "Report",
        "SparseCoreCall",
    )
)

_PARTS = re.compile(
    r"<!--(?P<comment>.*?)-->"
    r"|^## (?P<heading>.*?)$"
    r"|^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_COMMENTS = re.compile(
    r"not run: \S.*|run on [^:]*|\w+: (begin|end)", re.DOTALL
)


@dataclasses.dataclass
class Block:
    """A ```python block of a page.

    Attributes:
        page: the page's path in the repository.
        heading: the heading of the page's section.
        line: the line that the block begins in.
        code: the code.
        first: code of the page that runs before it in the same process.
        place: where it runs.
        not_run: why it isn't run, or None.
        output: the text of the block without a language right behind it, which
            is what the code prints; None: there is no such block.
    """

    page: str
    heading: str
    line: int
    code: str
    first: str = ""
    place: str = ANYWHERE
    not_run: str | None = None
    output: str | None = None

    def run(self, names):
        """Runs the block; compares what it prints, if the page shows that."""
        printed = io.StringIO()
        where = ROOT / self.page
        names.update(_names_after(self.first, f"{where}: blocks above"))
        # So that a traceback has the page's lines.
        padded = "\n" * (self.line - 1) + self.code
        with contextlib.redirect_stdout(printed):
            exec(compile(padded, str(where), "exec"), names)
        if self.output is not None:
            assert _lines(printed.getvalue()) == _lines(self.output)


@functools.cache
def _names_after(code, where):
    """The names that code defines, which runs once in a process."""
    names = {}
    exec(compile(code, where, "exec"), names)
    return names


def _lines(text):
    return [line.rstrip() for line in text.strip().splitlines()]


def blocks(page):
    """The ```python blocks of a page, in order."""
    text = (ROOT / page).read_text("utf-8")
    found, heading, options, end = [], "", {}, 0
    for part in _PARTS.finditer(text):
        if part["heading"] is not None:
            heading = part["heading"]
        elif part["comment"] is not None:
            options.update(_options(part["comment"], page))
        elif part["language"] == "python":
            line = text.count("\n", 0, part.start("code")) + 1
            if options.pop("after", False):
                options["first"] = "\n".join(
                    code
                    for block in found
                    if block.place == ANYWHERE and block.not_run is None
                    for code in (block.first, block.code)
                )
            found.append(Block(page, heading, line, part["code"], **options))
            options, end = {}, part.end()
        elif end and not text[end : part.start()].strip():
            found[-1].output = part["code"]
    assert not options, f"{page}: a comment without a block: {options}"
    return found


def code(page, language):
    """The text of a page's blocks of another language, in order."""
    text = (ROOT / page).read_text("utf-8")
    return [
        part["code"]
        for part in _PARTS.finditer(text)
        if part["language"] == language
    ]


def _options(comment, page):
    """The options of the next block in a comment; {} if it has none."""
    assert _COMMENTS.fullmatch(comment.strip()), (
        f"{page}: a comment may say where a block runs, or why it doesn't, and "
        f"can't have code that readers don't see: {comment.strip()!r}"
    )
    kind, _, rest = comment.strip().partition(": ")
    if kind == "not run":
        return {"not_run": " ".join(rest.split())}
    if kind.startswith("run on "):
        place, _, after = kind.removeprefix("run on ").partition(", ")
        assert place in PLACES, f"{page}: unknown place {place!r}"
        assert after in ("", "after the blocks above"), f"{page}: {after!r}"
        return {"place": place, "after": bool(after)}
    return {}


def run_pages(place):
    """Runs the blocks of one place, each page's in names of their own."""
    ran = []
    for page in PAGES:
        names = {}
        for block in blocks(page):
            if block.place == place and block.not_run is None:
                block.run(names)
                ran.append(block)
    return ran


def public_modules():
    """The package and its public submodules, by name."""
    # The latter is not brought by *: a program may have no use for Keras 3.
    modules = {"tfrs_embed": tfrs_embed, "tfrs_embed.keras3": tfrs_embed.keras3}
    for name in tfrs_embed.__all__:
        value = getattr(tfrs_embed, name)
        if inspect.ismodule(value):
            modules[f"tfrs_embed.{name}"] = value
    return modules


def public_names():
    """All that is public and has a docstring of its own, by full name."""
    found = {}
    for path, module in public_modules().items():
        found[path] = module
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found[f"{path}.{name}"] = value
    return found


def example(name, names):
    """The example in a public name's docstring; it may be empty.

    Args:
        name: a name that `public_names` has.
        names: the names that the example may use.
    """
    text = inspect.cleandoc(public_names()[name].__doc__)
    return doctest.DocTestParser().get_doctest(text, names, name, None, 0)


class _Runner(doctest.DocTestRunner):
    """Raises the error that TensorFlow has no SparseCores; it is no failure."""

    def report_unexpected_exception(self, out, test, example, exc_info):
        if NO_SPARSE_CORES in str(exc_info[1]):
            raise exc_info[1]
        super().report_unexpected_exception(out, test, example, exc_info)


def run_example(name, names=None):
    """Runs a public name's example; what it prints must be what it shows.

    Args:
        name: a name that `public_names` has.
        names: the names that it may use, to which its own are added; None:
            `IMPORTS`.
    """
    test = example(name, IMPORTS if names is None else names)
    printed = io.StringIO()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = _Runner(optionflags=flags)
    runner.run(test, out=printed.write, clear_globs=False)
    assert not runner.failures, printed.getvalue()
    if names is not None:
        names.update(test.globs)

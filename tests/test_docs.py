"""The code in the README, on the pages of docs and in docstrings runs."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

import documentation
import error_texts
from documentation import ANYWHERE, ON_SLICE, ON_TPU_WHEEL, PAGES
from run_in_processes import run

#: What is on the pages and can't run, as the pages' sources say.
NOT_RUN = {
    "docs/migrating.md": ["the other library's code"] * 5,
}
#: These run with a request to their models.
SERVED = ("README.md", "docs/serving.md")
#: Their sections run by themselves, each after the blocks above the first.
BY_SECTION = ("docs/migrating.md", "docs/before_and_after.md")
#: What holds after a page's code has run.
HOLDS = {
    # With films' vectors that aren't trained it is 6.09.
    "README.md": lambda names: (
        names["model"].history.history["loss"][-1] < 6.04
    ),
    "docs/checkpoints.md": lambda names: names["movies"].shape == (100, 8),
    "docs/gradients.md": lambda names: int(names["layer"].step) == 3,
    "docs/start.md": lambda names: (
        names["losses"][-1] < 0.3 < 0.6 < names["losses"][0]
    ),
}
#: These show what the kernels say of themselves.
OF_KERNELS = [
    "tfrs_embed.kernels",
    "tfrs_embed.kernels.Status",
    "tfrs_embed.kernels.status",
]


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def runnable(page):
    return [
        block
        for block in documentation.blocks(page)
        if block.place == ANYWHERE and block.not_run is None
    ]


@pytest.mark.docs
@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p not in BY_SECTION + SERVED and runnable(p)],
)
def test_a_page_runs(page):
    names = {}
    for block in runnable(page):
        block.run(names)
    assert page not in HOLDS or HOLDS[page](names)


SECTIONS = {
    f"{page} {heading}": [
        block for block in runnable(page) if block.heading in ("", heading)
    ]
    for page in BY_SECTION
    for heading in dict.fromkeys(block.heading for block in runnable(page))
    if heading
}


@pytest.mark.docs
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_runs_by_itself(section):
    names = {}
    for block in SECTIONS[section]:
        for package in re.findall(r"^import (keras_rs)", block.code, re.M):
            pytest.importorskip(package)  # There is none for Python 3.10.
        block.run(names)


def test_what_does_not_run_says_why():
    found = {}
    for page in PAGES:
        reasons = [b.not_run for b in documentation.blocks(page) if b.not_run]
        if reasons:
            found[page] = reasons
    assert found == NOT_RUN


def test_pages_have_no_hidden_code(tmp_path, monkeypatch):
    monkeypatch.setattr(documentation, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    for hidden in ("run first:\nx = 1\n", "x = 1", "run on replicas: x = 1"):
        page.write_text(f"<!-- {hidden}-->\n\n```python\nprint(x)\n```\n")
        with pytest.raises(
            AssertionError, match=r"page\.md: a comment may say"
        ):
            documentation.blocks("page.md")


def test_the_first_model_has_few_lines():
    first = documentation.blocks("README.md")[0]
    assert sum(map(bool, first.code.splitlines())) <= 25


@pytest.mark.parametrize("page", PAGES)
def test_all_blocks_are_found(page):
    text = (documentation.ROOT / page).read_text("utf-8")
    assert len(documentation.blocks(page)) == text.count("```python")


def test_every_other_library_has_code_that_runs():
    for page, count in zip(BY_SECTION, (7, 6), strict=True):
        assert sum(each.startswith(page) for each in SECTIONS) == count


def test_the_page_of_errors_has_all_texts_of_the_code():
    """`python tests/error_texts.py` writes its lists."""
    text = error_texts.PAGE.read_text("utf-8")
    assert text == error_texts.page(text)
    for words in ("id … is out of range; the table", "has … rows: k must not"):
        assert f"\n{words}" in text


def test_a_new_error_is_missing_on_the_page_of_errors(tmp_path, monkeypatch):
    code = """
def check(table, rows):
    text = f"Table '{table}' has {rows} rows, which are too many."
    raise ValueError(text if rows else f"Table '{table}': no rows are there.")
    raise tf.errors.OpError(None, None, message("one part ", rows, " of it"))
    raise damaged(f"'{table}' is cut off within its {rows} rows")
"""
    (tmp_path / "tfrs_embed/storage").mkdir(parents=True)
    (tmp_path / "tfrs_embed/storage/new.py").write_text(code)
    monkeypatch.setattr(error_texts, "ROOT", tmp_path)
    assert error_texts.lists()["tables"] == [
        "is cut off within its … rows",
        "one part … of it",
        "Table '…' has … rows, which are too many.",
        "Table '…': no rows are there.",
    ]
    text = error_texts.PAGE.read_text("utf-8")
    assert "is cut off within its … rows" in error_texts.page(text)


def test_the_page_has_the_order_of_packages_that_imports_have():
    contract = (documentation.ROOT / "pyproject.toml").read_text("utf-8")
    [layers] = re.findall(r"^layers = \[\n(.*?)^\]", contract, re.M | re.S)
    wanted = [set(re.findall(r"\w+", line)) for line in layers.splitlines()]
    text = (documentation.ROOT / "docs/architecture.md").read_text("utf-8")
    table = text.partition("## The order of packages")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    assert [{"__main__"}, *map(set, map(_words, rows))] == wanted


def test_the_files_that_the_page_names_are_there():
    """From the repository's folder, or the package's."""
    text = (documentation.ROOT / "docs/architecture.md").read_text("utf-8")
    named = re.findall(r"`(\w[\w./]*(?:\.(?:py|cc|h|md|toml)|/))`", text)
    assert len(named) > 50
    folders = [documentation.ROOT, documentation.ROOT / "tfrs_embed"]
    for name in named:
        assert any((folder / name).exists() for folder in folders), name


def _words(text):
    return re.findall(r"\w+", text)


EXAMPLES = [
    name
    for name in documentation.public_names()
    if name not in (*ON_SLICE, *ON_TPU_WHEEL)
]


@pytest.mark.docs
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, request):
    if name in OF_KERNELS:
        request.getfixturevalue("needs_kernels")
    documentation.run_example(name)


# Of several workers: in test_strategies.py, which has some for other tests.
@pytest.mark.docs
def test_code_that_needs_replicas():
    run(["strategies/test_documentation.py"], "tpu:4x4")


@pytest.mark.docs
def test_the_requests_of_the_page_go_to_the_exported_models():
    """As TensorFlow Serving reads them: by columns, or by rows."""
    for page in SERVED:
        test_a_page_runs(page)
    [request] = [
        text
        for text in documentation.code("docs/serving.md", "bash")
        if text.startswith("curl")
    ]
    body = json.loads(request.partition("-d '")[2].rpartition("'")[0])
    assert "/models/ratings:predict" in request
    model = tf.saved_model.load("models/ratings/1")
    signature = model.signatures[body["signature_name"]]
    columns = _tensors(signature, body["inputs"])
    answers = signature(**columns)
    assert [a.shape for a in answers.values()] == [(2, 1683)]
    seen = tf.RaggedTensor.from_row_splits(
        columns.pop("seen_values"), columns.pop("seen_row_splits")
    )
    expected = model.serve({**columns, "seen": seen})
    np.testing.assert_allclose(*answers.values(), expected)

    text = (documentation.ROOT / "docs/serving.md").read_text("utf-8")
    [rows] = re.findall(r'^`(\{"instances": .*)`\.', text, re.M)
    rows = json.loads(rows)["instances"]
    signature = tf.saved_model.load("models/ranking/1").signatures[
        "serving_default"
    ]
    by_column = {name: [row[name] for row in rows] for name in rows[0]}
    [scores] = signature(**_tensors(signature, by_column)).values()
    assert scores.shape == (2, 2)


def _tensors(signature, values):
    """The tensors of JSON's lists, of the dtypes that a signature has."""
    _, specs = signature.structured_input_signature
    assert set(values) == set(specs)
    return {n: tf.constant(v, specs[n].dtype) for n, v in values.items()}

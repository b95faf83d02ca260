"""Reports as pages: what they say, and what a browser makes of them."""

import ast
import base64
import functools
import html.parser
import json
import os
import pathlib
import re
import shutil
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import report_inputs
import tfrs_embed
from report_inputs import DIM, ODD, ROWS
from tfrs_embed.__main__ import main
from tfrs_embed.checkpoint import bundle
from tfrs_embed.compat.text_table import printable
from tfrs_embed.tools.conversion import reading
from tfrs_embed.tools.monitoring.reports import top_shares
from tfrs_embed.tools.report import pictures
from tfrs_embed.tools.report.measured import measure_tables

pytestmark = [pytest.mark.tools, pytest.mark.xdist_group("report")]

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, _BROWSERS)), None)
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    report_inputs.make(folder)
    return folder


class Page(html.parser.HTMLParser):
    """Checks that tags are closed; collects tables' cells, facts and tags."""

    EMPTY = ("meta", "link", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.headings, self.rows, self.facts = [], [], {}
        self.source = text
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        last = self.open[-1] if self.open else ""
        if last in ("td", "th"):
            self.rows[-1][-1] += data
        if last in ("h1", "h2"):
            self.headings.append(data)
        if last == "dt":
            self.facts[data] = None
        if last == "dd":
            self.facts[list(self.facts)[-1]] = data

    def cells(self, column, first):
        """The cells of a column in the row of a table, in all of its tables."""
        found, head = [], []
        for row in self.rows:
            if row[0] in ("table", "checkpoint", "replica", "layer"):
                head = row
            elif row[0] == first and column in head:
                found.append(row[head.index(column)])
        return found


@functools.cache
def page(*paths):
    """The page of paths, made once; `made` is the same in all tests."""
    return Page(tfrs_embed.report.render(paths))


def test_tables_of_a_checkpoint(made):
    found = page(made / "run" / "ckpt-4")
    assert found.headings[0] == "Checkpoint ckpt-4"
    assert found.facts["tables"] == "3"
    assert found.facts["rows"] == f"{sum(ROWS.values()):,}"
    assert found.facts["NaN and infinite values"] == "1"
    assert found.facts["step"] == "12"
    assert found.facts["checkpoints"] == "1"
    for name, rows in ROWS.items():
        kib = rows * DIM * 4 / 1024
        for column in ("row bytes", "slot bytes"):
            assert found.cells(column, name) == [f"{kib:.1f} KiB"]
        assert found.cells("bytes", name) == [f"{2 * kib:.1f} KiB"]
    assert found.cells("zero share", "movies") == ["40%"]
    assert found.cells("zero share", "users") == ["0%"]
    assert found.cells("nan", "movies") == ["1"]
    # Ids of the other half are never looked up.
    ids = report_inputs.ids(400)
    for i, (name, rows) in enumerate(ROWS.items()):
        untouched = rows - len(np.unique(ids[f"feature_{i}"]))
        share = f"{100 * untouched / rows:.3g}%"
        assert found.cells("untouched share", name) == [share]


def test_norms_are_those_of_the_values(made):
    path = str(made / "run" / "ckpt-3")
    found = page(path)
    [key] = [k for k, _ in tf.train.list_variables(path) if "users/par" in k]
    norms = np.linalg.norm(tf.train.load_variable(path, key), axis=1)
    for name, expected in (("max", norms.max()), ("mean", norms.mean())):
        [cell] = found.cells(f"{name} row norm", "users")
        # In other dtypes the last of four digits may be another one.
        assert float(cell) == pytest.approx(expected, rel=1e-3)


def test_growth_over_checkpoints(made):
    found = page(made / "run")
    assert "Growth over checkpoints" in found.headings
    assert found.facts["checkpoints"] == "4"
    # Of the numbers that changed there are lines, of the others bars.
    pictures_of = {a["alt"] for tag, a in found.tags if tag == "img"}
    assert {"mean row norm", "zero share", "bytes"} <= pictures_of
    assert "inf" not in pictures_of
    for i in range(1, 5):
        assert found.cells("step", f"ckpt-{i}") == [str(min(4 * i, 12))]
    assert found.cells("zero share", "ckpt-3") == ["0%"]
    assert found.cells("zero share", "ckpt-4") == ["9.52%"]
    # The same, each checkpoint by its own path, in another order. The last two
    # have one step, and stay as they are given.
    every = [made / "run" / f"ckpt-{i}" for i in (2, 1, 3, 4)]
    assert page(*every).rows == found.rows


def test_checkpoints_of_one_name_in_two_folders(made, tmp_path):
    shutil.copytree(made / "run", tmp_path / "run")
    both = [str(folder / "run" / "ckpt-1") for folder in (made, tmp_path)]
    found = page(*both)
    assert all(found.cells("step", path) == ["4"] for path in both)


def test_a_table_that_grew(tmp_path):
    paths = []
    for rows in (100, 400):
        table = tfrs_embed.TableConfig("movie", rows, 4)
        layer = tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table), "sgd", size_threshold=10
        )
        layer.build()
        checkpoint = tf.train.Checkpoint(layer=layer)
        paths.append(checkpoint.write(str(tmp_path / f"of_{rows}")))
    found = page(*paths)
    assert found.cells("rows", "of_100") == ["100"]
    assert found.cells("rows", "of_400") == ["400"]
    assert found.cells("bytes", "of_400") == ["6.2 KiB"]
    # SGD has no slots.
    assert found.cells("untouched share", "movie") == ["-"]


@pytest.mark.parametrize(
    "optimizer", ["sgd", "adagrad", "adam", "ftrl", "row_wise_adagrad"]
)
@pytest.mark.parametrize("dim", [1, 4])
def test_rows_that_were_never_updated(tmp_path, optimizer, dim):
    chosen = optimizer
    if optimizer == "row_wise_adagrad":
        chosen = tfrs_embed.optimizers.RowWiseAdagrad(0.1)
    elif optimizer == "ftrl":
        chosen = tf.tpu.experimental.embedding.FTRL(0.1)
    table = tfrs_embed.TableConfig("movie", 50, dim)
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("f", table), chosen, size_threshold=10
    )
    checkpoint = tf.train.Checkpoint(layer=layer)
    layer.build()
    untouched = []
    for ids in ([], range(3, 13), range(50)):
        if ids:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(tf.constant(list(ids))) ** 2)
            tape.gradient(loss, layer.trainable_variables)
        path = checkpoint.write(str(tmp_path / "checkpoint"))
        [found] = measure_tables(reading.read(path)).values()
        untouched.append(found["untouched_share"])
    assert untouched == ([None] * 3 if optimizer == "sgd" else [1.0, 0.8, 0.0])


def test_tables_are_read_in_blocks(made, monkeypatch):
    read = []
    original = bundle.BundleReader.read_rows

    def read_rows(self, name, start, size):
        read.append(size)
        return original(self, name, start, size)

    monkeypatch.setattr(bundle, "BLOCK_BYTES", 100 * DIM * 4)
    monkeypatch.setattr(bundle.BundleReader, "read_rows", read_rows)
    blocks = Page(tfrs_embed.report.render(made / "run" / "ckpt-4"))
    assert max(read) == 100
    monkeypatch.undo()
    assert page(made / "run" / "ckpt-4").rows == blocks.rows


@pytest.mark.parametrize("rows", ["float32", "int8"])
def test_an_exported_model(made, rows):
    found = page(made / f"model_{rows}")
    assert found.headings[0] == f"Exported model model_{rows}"
    size = 4 * DIM if rows == "float32" else DIM + 4
    for name, number in ROWS.items():
        kib = number * size / 1024
        assert found.cells("bytes", name) == [f"{kib:.1f} KiB"]
        assert found.cells("dtype", name) == [rows]
        assert found.cells("untouched share", name) in ([], ["-"])
    # The values are those of the rows, whatever they are stored as.
    before = page(made / "run" / "ckpt-3")
    for name in (ODD, "users"):
        [norm] = found.cells("norm", name)
        [expected] = before.cells("norm", name)
        assert float(norm) == pytest.approx(float(expected), rel=5e-3)


def test_a_model_that_tensorflow_saves(tmp_path):
    table = tfrs_embed.TableConfig("movies", 20, DIM)
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("x", table), "adagrad", size_threshold=0
    )
    ids = tf_keras.Input([], dtype="int64")
    model = tf_keras.Model(ids, layer(ids))
    path = f"{tmp_path}/model"
    tf.saved_model.save(model, path)
    found = page(path)
    assert found.cells("rows", "movies") == ["20"]
    assert found.cells("slots", "movies") == ["accumulators"]


def test_a_saved_model_of_others(tmp_path):
    module = tf.Module()
    module.v = tf.Variable(1.0)
    tf.saved_model.save(module, str(tmp_path / "other"))
    with pytest.raises(ValueError, match="has no tables of this package"):
        page(tmp_path / "other")


def test_a_log(made):
    found = page(made / "log")
    assert found.facts["steps"] == "0 to 12"
    [last] = tfrs_embed.monitoring.read_log(made / "log")[-1:]
    for table in last["tables"]:
        name = f"{last['layer']}/{table['table']}"
        norm = f"{table['norms']['0.5']:.4g}"
        assert found.cells("norms 0.5", name) == [norm]
        assert found.cells("rows", name) == [f"{table['rows']:,}"]
        share = f"{100 * table['untouched_share']:.3g}%"
        assert found.cells("untouched share", name) == [share]
        top = f"{100 * table['lookups']['top_shares']['0.01']:.3g}%"
        assert found.cells("lookups top shares 0.01", name) == [top]
    assert page(made / "log" / "tables.jsonl").rows == found.rows


def test_a_log_of_several_workers(made, tmp_path):
    lines = (made / "log" / "tables.jsonl").read_text()
    (tmp_path / "tables.jsonl").write_text(lines)
    other = []
    for line in lines.splitlines():
        report = json.loads(line)
        report["layer"] = "layer"
        for table in report["tables"]:
            table["untouched_share"] = 1.0
            table["lookups"] = None
        report["replicas"] = [{"replica": 0, "unique_keys": 9, "bytes": 2048}]
        report["imbalance"] = 1.0
        other.append(json.dumps(report))
    (tmp_path / "tables.jsonl.worker-1").write_text("\n".join(other))
    found, alone = page(tmp_path), page(made / "log")
    assert found.facts["workers"] == "2"
    users = "layer/users of worker 1"
    assert found.cells("rows", users) == [f"{ROWS['users']:,}"]
    assert found.cells("untouched share", users) == ["100%"]
    assert found.cells("lookups ids", users) == []
    replica = "layer/replica 0 of worker 1"
    assert found.cells("bytes", replica) == ["2.0 KiB"]
    assert found.cells("imbalance", "layer of worker 1") == ["1"]
    # The first worker's tables are as they were.
    rows = [
        [row[0].removesuffix(" of worker 0"), *row[1:]] for row in found.rows
    ]
    assert all(row in rows for row in alone.rows)


def test_keys_of_a_checkpoint_have_a_curve(made):
    found = page(made / "keys")
    assert found.cells("by", "keys/table") == ["keys"]
    assert found.cells("rows", "keys/table") == ["4"]
    # Of ten lookups seven are of one key; a row is the least.
    shares = [
        found.cells(f"keys top shares {top}", "keys/table")
        for top in ("0.01", "0.5")
    ]
    assert shares == [["70%"], ["80%"]]


@pytest.mark.parametrize("rows", [7, 50, 100_000])
def test_top_shares(rows):
    counts = np.random.default_rng(0).zipf(1.3, 50) % 1_000 + 1
    counts = counts[:rows]
    shares = top_shares(counts, rows)
    ordered = np.sort(counts)[::-1]
    for share, found in shares.items():
        top = ordered[: max(1, int(rows * share))]
        assert found == pytest.approx(top.sum() / ordered.sum())
    lookups, number = np.unique(counts, return_counts=True)
    assert top_shares(lookups, rows, number) == pytest.approx(shares)
    assert top_shares(np.array([], int), rows) == {}


def test_several_sources_are_parts_of_one_page(made):
    found = page(
        made / "model_int8",
        made / "run" / "ckpt-1",
        made / "log",
        made / "run" / "ckpt-2",
    )
    titles = [
        "Exported model model_int8",
        "Statistics log",
        "Checkpoint ckpt-2",
    ]
    assert [h for h in found.headings if h in titles] == titles
    links = [a["href"] for t, a in found.tags if t == "a"]
    assert links == ["#part-1", "#part-2", "#part-3"]


def test_a_log_beside_checkpoints_hides_none(made, tmp_path):
    shutil.copytree(made / "keys", tmp_path / "all")
    shutil.copy(made / "log" / "tables.jsonl", tmp_path / "all")
    found = page(tmp_path / "all")
    assert "Statistics all" in found.headings
    assert "Checkpoint checkpoint-1" in found.headings


def test_a_page_needs_no_other_file(made):
    found = page(made / "run", made / "log")
    for tag, attributes in found.tags:
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:")), tag
    assert not re.search(r"@import|url\((?!#)", found.source)
    assert "script" not in {tag for tag, _ in found.tags}
    # And it is the same each time.
    again = tfrs_embed.report.render([made / "keys"])
    assert again == page(made / "keys").source


def test_names_are_text(made):
    found = page(made / "run", made / "log")
    assert "b" not in {tag for tag, _ in found.tags}
    assert ODD in found.text


SCRIPT = "<script>alert('1')</script>"
HIDDEN = "\x1b[2J\x9b1m\u202egnp\0\ud800\n"


def test_a_page_has_no_markup_and_no_hidden_letters_of_files(tmp_path):
    folder = tmp_path / f"{SCRIPT[:7]} \u202e"
    folder.mkdir()
    name = f"{SCRIPT}{HIDDEN}"
    tables = [
        {"table": name, name: name, "rows": 1, "bytes": 2, "norms": {name: 1}}
    ]
    lines = [
        {"layer": name, "step": step, "tables": tables, "imbalance": step}
        for step in (1, 2)
    ]
    (folder / "tables.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = page(folder)
    assert "script" not in {tag for tag, _ in found.tags}
    assert f"{SCRIPT}{printable(HIDDEN)}" in " ".join(found.text)
    hidden = [c for c in found.source if printable(c) != c]
    assert set(hidden) == {"\n"}


@pytest.mark.parametrize(
    "name",
    [
        "x" * 300,
        "a\nb\tc",
        "\ud800\x1b",
        "цены 价格",
        "$x_1$",
        "<script>",
        "-->",
    ],
)
def test_names_in_pictures(name):
    drawn = [
        pictures.bars("caption", {name: 1.0, "b": 2.0}, str),
        pictures.lines("caption", {name: {0: 1.0, 1: 2.0}}, str, "step"),
    ]
    for picture in drawn:
        svg = base64.b64decode(picture.uri.partition(",")[2]).decode()
        text = "".join(ElementTree.fromstring(svg).itertext())
        assert printable(name)[-5:] in text


def test_many_tables_in_pictures():
    names = [f"table {i}" for i in range(100)]
    picture = pictures.bars("Sizes", dict.fromkeys(names, 1.0), str)
    assert picture.caption == "Sizes (without 85 more)"
    series = {name: {0: 1.0, 1: 2.0} for name in names}
    picture = pictures.lines("Norms", series, str, "step")
    assert picture.caption == "Norms (without 92 more)"


# The command.


def test_the_command(made, tmp_path, capsys):
    output = tmp_path / "page.html"
    sources = (str(made / "keys" / "checkpoint-1.index"),)
    assert main(["report", *sources, "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"Written to '{output}'.\n"
    assert output.read_text() == page(*sources).source


def _write(name, text):
    def write(folder):
        (folder / name).write_text(text)
        return folder / name

    return write


def _damaged_log(folder):
    (folder / "tables.jsonl").write_text('{"layer": "a", "step"}')
    return folder


def _foreign_log(folder):
    line = {"layer": "a", "step": 1, "tables": [{"rows": 1}]}
    (folder / "tables.jsonl").write_text(json.dumps(line))
    return folder


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda f: f / "none", "no checkpoint '.*/none': .* A report needs a "),
        (lambda f: f, r"The folder '.*' doesn't say .* A report needs a chec"),
        (lambda f: f / "tables.jsonl", "has no tables.jsonl"),
        (lambda f: "", "The path is empty"),
        (lambda f: "ftp://x/y", "TensorFlow has no file system 'ftp'"),
        (
            _write("a.txt", "hello"),
            "no checkpoint '.*a.txt': .* A report needs",
        ),
        (_damaged_log, "tables.jsonl', line 1, is not JSON: Expecting ':'"),
        (
            _write("tables.jsonl", "[" * 10**5),
            "tables.jsonl', line 1, is not JSON: maximum",
        ),
        (
            _write("tables.jsonl", '{"a": 1%s}' % ("0" * 400)),
            "tables.jsonl', line 1, is not JSON: 10+ has more than 64 bits",
        ),
        (_foreign_log, "a line of tables.jsonl is not a report .* 'table'"),
    ],
)
def test_wrong_input(tmp_path, capsys, make, message):
    (tmp_path / "in").mkdir()
    path = str(make(tmp_path / "in"))
    output = tmp_path / "page.html"
    assert main(["report", path, "--output", str(output)]) == 2
    printed = capsys.readouterr().err
    assert re.fullmatch(f"error: .*{message}.*\n", printed), printed
    assert not output.exists()


def test_checkpoints_without_tables(tmp_path, capsys):
    variable = tf.train.Checkpoint(v=tf.Variable(1.0))
    path = variable.write(str(tmp_path / "plain"))
    assert main(["report", path]) == 2
    assert "has no tables of this package" in capsys.readouterr().err


def test_checkpoints_of_two_runs(made, capsys):
    paths = [str(made / "run" / "ckpt-1"), str(made / "keys")]
    assert main(["report", *paths]) == 2
    assert "have no table in common" in capsys.readouterr().err


def test_a_damaged_checkpoint(made, tmp_path, capsys):
    shutil.copytree(made / "run", tmp_path / "run")
    for data in (tmp_path / "run").glob("ckpt-2.data*"):
        os.truncate(data, data.stat().st_size // 2)
    path = str(tmp_path / "run" / "ckpt-2")
    output = str(tmp_path / "page.html")
    assert main(["report", path, "--output", output]) == 1
    assert "is missing or cut off" in capsys.readouterr().err


def test_a_folder_lists_no_checkpoint_of_another_folder(made, tmp_path, capsys):
    there = made / "run" / "ckpt-1"
    state = f'model_checkpoint_path: "{there}"\n'
    (tmp_path / "checkpoint").write_text(state)
    output = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--output", str(output)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"names the checkpoint '{there}', which is in another" in line
    assert not output.exists()


@pytest.mark.parametrize("place", [".", "none/page.html"])
def test_an_output_that_is_no_file(made, tmp_path, capsys, place):
    output = str(tmp_path / place)
    assert main(["report", str(made / "run"), "--output", output]) == 2
    assert "can't be written to" in capsys.readouterr().err


def test_an_output_that_is_read(made, tmp_path, capsys):
    log = pathlib.Path(shutil.copy(made / "log" / "tables.jsonl", tmp_path))
    assert main(["report", str(log), "--output", str(log)]) == 2
    assert "is to be read" in capsys.readouterr().err
    assert log.read_text() == (made / "log" / "tables.jsonl").read_text()


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_the_extra(made, tmp_path, capsys, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    output = str(tmp_path / "page.html")
    assert main(["report", str(made / "run"), "--output", output]) == 1
    error = capsys.readouterr().err
    assert 'pip install "tfrs_embed[report]"' in error and missing in error


def test_the_extra_is_imported_when_it_is_used():
    package = pathlib.Path(tfrs_embed.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                text = ast.unparse(node)
                assert not re.search("jinja2|matplotlib", text), path


# The page in a browser.

ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")
#: Elements that reach out of the window, but for those in boxes that scroll.
OUTSIDE = """
const width = document.documentElement.clientWidth;
return [...document.body.querySelectorAll('*')].filter(e => {
  const box = e.getBoundingClientRect();
  const scrolls = e.closest('.wide');
  return (!scrolls || scrolls === e) && box.width > 0
      && (box.right > width + 1 || box.left < -1);
}).map(e => e.outerHTML.slice(0, 200));
"""
SCROLLING = """
return [...document.querySelectorAll('.wide')].some(
  e => e.scrollWidth > e.clientWidth
  && getComputedStyle(e).overflowX === 'auto');
"""
COLOURS = """
const style = getComputedStyle(document.body);
const picture = document.querySelector('img');
return [style.color, style.backgroundColor, getComputedStyle(picture).filter];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not BROWSER or not DRIVER:
        pytest.skip("there is no chromium with chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    folder = tmp_path_factory.mktemp("chromium")
    for argument in (*ARGUMENTS, f"--user-data-dir={folder}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def test_a_browser_shows_the_page(browser, made, tmp_path):
    path, wide = tmp_path / "page.html", tmp_path / "wide.html"
    sources = ("run", "log")
    path.write_text(page(*(made / source for source in sources)).source)
    wide.write_text('<p style="width: 2000px">a</p>')
    colours = []
    for width, scheme in ((1280, "light"), (400, "dark")):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {**size, "mobile": False}
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [feature]}
        )
        browser.get(wide.as_uri())
        assert browser.execute_script(OUTSIDE)  # The check can fail.
        browser.get(path.as_uri())
        assert browser.get_log("browser") == []
        assert browser.execute_script(OUTSIDE) == []
        assert browser.execute_script(SCROLLING)
        colours.append(browser.execute_script(COLOURS))
    for light, dark in zip(*colours, strict=True):
        assert light != dark

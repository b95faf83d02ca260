"""What the examples share: flags, a quiet start, and pictures."""

import importlib
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from absl.flags import FLAGS

import movielens_files
from documentation import ROOT

pytestmark = pytest.mark.tools

EXAMPLES = ROOT / "examples"

PROGRAM = """
import common_flags
from absl import app, flags

FLAGS = flags.FLAGS
common_flags.training(epochs=12, size_threshold=500)


def main(argv):
    print(argv, FLAGS.epochs)


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
"""


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    # Else it would import TensorFlow with its output held back.
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def defined():
    """The shared flags, for as long as this module's tests run."""
    before = set(FLAGS)
    with pytest.MonkeyPatch.context() as patch:
        common_flags = load("common_flags", patch)
        patch.setattr(common_flags.logging, "set_verbosity", lambda _: None)
        common_flags.training(epochs=12, size_threshold=500)
        common_flags.strategy()
        common_flags.workers()
        common_flags.row_dtype("table_dtype", "of rows")
        yield common_flags
    for name in set(FLAGS) - before:
        delattr(FLAGS, name)


@pytest.fixture
def parse(defined):
    yield lambda *arguments: defined.parse(["program.py", *arguments])
    FLAGS.unparse_flags()
    for name in ("epochs", "size_threshold", "data", "strategy", "table_dtype"):
        FLAGS[name].unparse()


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ([], {"epochs": 12, "size_threshold": 500, "data": None}),
        (["--epochs", "3", "--strategy=mirrored:2"],
         {"epochs": 3, "strategy": "mirrored:2", "workers": None}),
        (["--size-threshold", "none", "--data", "a-b"],
         {"size_threshold": None, "data": pathlib.Path("a-b")}),
        (["--table-dtype=bfloat16"], {"table_dtype": "bfloat16"}),
        (["--size_threshold", "0"], {"size_threshold": 0, "slurm": False}),
    ],
)  # fmt: skip
def test_flags_are_read(parse, arguments, read):
    assert parse(*arguments) == ["program.py"]
    assert {name: getattr(FLAGS, name) for name in read} == read


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs=0: 0 is not a positive"),
        (["--epochs", "many"], "--epochs=many: "),
        (["--epoch", "3"], "'epoch'"),
        (["--epochs"], "epochs"),
        (["--seed=-1"], "--seed=-1: "),
        (["--data="], "--data=: must be a path"),
        (["--size_threshold=-1"], "must be a number of rows, or none"),
        (["--size_threshold=all"], "must be a number of rows, or none"),
        (["--strategy", "mirrored:0"], "must be none or mirrored:N"),
        (["--strategy", "mirrored:2x"], "must be none or mirrored:N"),
        (["--table-dtype", "int8"], "--table_dtype=int8: "),
        (["mirrored:2"], "'mirrored:2' belongs to no flag"),
        (["--epochs", "3", "4"], "'4' belongs to no flag"),
    ],
)
def test_a_wrong_flag_is_said_in_one_line(parse, arguments, message):
    with pytest.raises(SystemExit) as raised:
        parse(*arguments)
    assert message in str(raised.value) and "--help" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_programs_start_with_the_shared_flags(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, str(path), *arguments],
            env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
            capture_output=True,
            text=True,
        )

    assert run("--epochs=3").stdout == f"['{path}'] 3\n"
    wrong = run("--epochs=0")
    assert wrong.returncode == 1 and wrong.stdout == ""
    [line] = wrong.stderr.splitlines()
    assert "--epochs=0" in line
    shown = run("--help").stdout
    assert "--epochs" in shown and "--size_threshold" in shown


def test_what_every_start_prints_is_left_out_and_errors_are_not(monkeypatch):
    told = load("_quiet_tensorflow", monkeypatch).told
    warning = "WARNING: All log messages before absl::InitializeLog() is\n"
    info = "I0000 00:00:1 12 port.cc:153] oneDNN custom operations are on.\n"
    no_drivers = "I0000 00:00:1 12 stub.cc:31] Could not find cuda drivers\n"
    no_gpu = "E0000 00:00:1 12 platform.cc:52] failed call to cuInit: 303\n"
    other = "E0000 00:00:1 12 other.cc:1] The disk is full.\n"
    python = "UserWarning: something else\n"
    assert told([warning, info, no_drivers, no_gpu]) == []
    assert told([info, other, no_drivers, python]) == [other, python]
    # With drivers it is an error.
    assert told([warning, info, no_gpu]) == [no_gpu]


@pytest.fixture
def pictures(monkeypatch):
    return load("movielens_pictures", monkeypatch)


def test_titles_are_written_as_they_are_said(pictures):
    assert pictures.spoken("Fish Called Wanda, A") == "A Fish Called Wanda"
    assert pictures.spoken("Rock: Part II, The") == "The Rock: Part II"
    assert pictures.spoken("Sex, Lies") == "Sex, Lies"
    assert pictures.spoken("Heat") == "Heat"


def test_movies_have_one_group(pictures, monkeypatch, tmp_path):
    movielens = load("movielens", monkeypatch)
    for genres, group in (
        (("Comedy", "Animation"), "for children, animation"),
        (("Drama", "Sci-Fi"), "science fiction, action"),
        (("Western",), "others"),
        ((), "others"),
    ):
        assert pictures.group(movielens.Movie("Title", genres)) == group
    movielens_files.write(tmp_path)
    movies = movielens.load_movies(tmp_path)
    assert len(movies) == movielens_files.MOVIES
    assert movies[9] == movielens.Movie("part 2 of 9", ("Drama",))
    with pytest.raises(FileNotFoundError, match=r"ml-100k\.item"):
        movielens.load_movies(tmp_path / "other")


def test_no_title_covers_another(pictures):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots()
    places = np.random.default_rng(0).normal(size=[60, 2]) ** 3
    axes.scatter(*places.T, label="movies")
    axes.legend()
    titles = [f"a rather long title {i}" for i in range(50)]
    pictures.label(figure, axes, places, titles)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert 3 < len(boxes) < 50
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
    for text in axes.texts:
        text.remove()
    far_apart = np.array([[0.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    pictures.label(figure, axes, far_apart, ["one", "two"])
    assert [text.get_text() for text in axes.texts] == ["one", "two"]
    plt.close(figure)

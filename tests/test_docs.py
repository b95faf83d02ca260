"""The code in docs runs as it stands."""

import pathlib
import re

import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "migrating.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Whose a block is, its first line says.
NEW, OLD = "# New", "# Old"


def sections():
    """The blocks of code before the first heading, and below each."""
    parts = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    before, *below = [
        (part.partition("\n")[0], BLOCK.findall(part)) for part in parts
    ]
    return before[1], {heading: found for heading, found in below if found}


BEFORE, BELOW = sections()


def test_every_library_has_code():
    assert len(BELOW) == 6


@pytest.mark.parametrize("heading", BELOW)
def test_new_code_runs(heading):
    names = {}
    for block in [*BEFORE, *BELOW[heading]]:
        assert block.startswith((NEW, OLD)), block
        if block.startswith(NEW):
            exec(compile(block, f"{PAGE}: {heading}", "exec"), names)


def make_model(rows=100):
    movies = tfrs_embed.TableConfig("movie", rows, 8)
    layer = tfrs_embed.PartialTPUEmbedding(
        {"movie": tfrs_embed.FeatureConfig("movie", movies)},
        "adagrad",
        size_threshold=10,
    )
    inputs = {"movie": tf_keras.Input([], dtype=tf.int64, name="movie")}
    return tf_keras.Model(inputs, layer(inputs))


def test_the_page_on_checkpoints(tmp_path):
    page = DOCS / "checkpoints.md"
    names = {
        "tf": tf,
        "tfrs_embed": tfrs_embed,
        "make_model": make_model,
        "folder": str(tmp_path),
    }
    blocks = BLOCK.findall(page.read_text("utf-8"))
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert names["movies"].shape == (100, 8)
    assert len(blocks) == 3


def test_the_page_on_gradients():
    page = DOCS / "gradients.md"
    names = {}
    blocks = BLOCK.findall(page.read_text("utf-8"))
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert int(names["layer"].step) == 3
    assert len(blocks) == 6

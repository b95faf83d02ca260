"""Deltas of models that replicas train."""

import numpy as np
import pytest
import tensorflow as tf

from process_tiers import on
from served_delta_models import ROWS, SPECS, Trainer, answers, apply, load
from strategies.replicas import of_chief
from tfrs_embed.checkpoint import bundle
from tfrs_embed.serving import export, export_delta

PLACEMENTS = {
    "row": {"placement": "row", "dtype": "bfloat16"},
    "hot rows": {"placement": "row", "hot_rows": range(0, ROWS, 3)},
    "column": {"placement": "column"},
    "table": {"placement": "table"},
    "replicated": {"placement": "replicated"},
}


@pytest.mark.parametrize("rows", ["float32", "float16", "int8", "int4"])
@on("mirrored:2", "workers:2", tier="nightly")
@on("workers:2", tier="more", when=lambda rows: rows == "float16")
def test_base_and_deltas_equal_an_export(strategy, tmp_path, rows, monkeypatch):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 640)  # Ten rows of 16.
    trainer = Trainer(strategy, PLACEMENTS)
    folder = of_chief(strategy, tmp_path)
    base = folder / "base"
    trainer.train(range(10))
    export(trainer.model, base, SPECS, rows=rows, updatable=True)
    served, since = load(base), base
    for number in (1, 2):
        trainer.train(range(5 * number, 30 * number), steps=2)
        users = trainer.model.users
        users.remove(users.keys()[::3])
        delta = folder / f"delta-{number}"
        assert export_delta(trainer.model, delta, since=since) == number
        assert apply(served, delta) == number
        since = delta
    export(trainer.model, folder / "fresh", SPECS, rows=rows)
    expected = answers(load(folder / "fresh"))
    np.testing.assert_array_equal(answers(served), expected)
    stored = tf.train.load_checkpoint(str(delta))
    shapes = stored.get_variable_to_shape_map()
    for name in PLACEMENTS:
        [key] = [k for k in shapes if k.endswith(f"/{name}/rows")]
        assert 0 < shapes[key][0] < ROWS


@on("workers:2", tier="more")
def test_an_error_on_one_worker_is_raised_on_all(
    strategy, tmp_path, monkeypatch
):
    trainer = Trainer(strategy)
    folder = of_chief(strategy, tmp_path)
    model, base = trainer.model, folder / "base"
    is_chief = strategy.extended.should_checkpoint
    trainer.train(range(10))
    export(model, base, SPECS, rows="float16", updatable=True)
    with pytest.raises((ValueError, RuntimeError), match=r"there already|The"):
        export(model, base, SPECS, updatable=True)
    trainer.train(range(20))
    movies = model.layer.embedding_tables["movie"]
    rows = movies.numpy()
    movies.assign(np.where(np.arange(ROWS)[:, None] == 7, 1e5, rows))
    with pytest.raises(ValueError, match=r"'movie' .* magnitude 100000"):
        export_delta(model, folder / "1", since=base)
    movies.assign(rows + 1)
    with pytest.raises(
        RuntimeError if is_chief else ValueError,
        match="failed on another" if is_chief else "neither a model",
    ):
        since = base if is_chief else tmp_path / "none"
        export_delta(model, folder / "1", since=since)
    with monkeypatch.context() as patch:
        if is_chief:
            patch.setattr(tf.io.gfile, "rename", _full)
        with pytest.raises(OSError if is_chief else RuntimeError):
            export_delta(model, folder / "1", since=base)
    assert not (folder / "1.index").exists()
    export_delta(model, folder / "1", since=base)
    with pytest.raises(ValueError, match="different paths in since"):
        since = base if is_chief else folder / "1"
        export_delta(model, folder / "2", since=since)
    if is_chief:
        assert not [*folder.glob("2*"), *folder.glob("*.incomplete")]
    served = load(base)
    assert apply(served, folder / "1") == 1
    export(model, folder / "fresh", SPECS, rows="float16")
    fresh = load(folder / "fresh")
    np.testing.assert_array_equal(answers(served), answers(fresh))


def _full(*args, **kwargs):
    raise OSError("no space left")

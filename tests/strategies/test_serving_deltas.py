"""Deltas of models that replicas train."""

import numpy as np
import pytest
import tensorflow as tf

from delta_models import SPECS, Trainer, answers, apply, load
from plans import on
from tfrs_embed.serving import export, export_delta


@pytest.mark.parametrize("rows", ["float32", "int8"])
@on("mirrored:2", tier="more")
@on("mirrored:2", when=lambda rows: rows == "int8")
def test_base_and_deltas_equal_an_export(strategy, tmp_path, rows):
    trainer, base = Trainer(strategy), tmp_path / "base"
    trainer.train(range(10))
    export(trainer.model, base, SPECS, rows=rows, updatable=True)
    served, since = load(base), base
    for number in (1, 2):
        trainer.train(range(5 * number, 30 * number), steps=4)
        users = trainer.model.users
        users.remove(users.keys()[::3])
        delta = tmp_path / f"delta-{number}"
        assert export_delta(trainer.model, delta, since=since) == number
        assert apply(served, delta) == number
        since = delta
    export(trainer.model, tmp_path / "fresh", SPECS, rows=rows)
    expected = answers(load(tmp_path / "fresh"))
    np.testing.assert_array_equal(answers(served), expected)


@on("workers:2", tier="more")
def test_several_workers_are_refused(strategy, tmp_path):
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        pytest.skip("it is of one worker")
    trainer = Trainer(strategy)
    trainer.train(range(10))
    with pytest.raises(ValueError, match="models that one process trains"):
        export(trainer.model, tmp_path / "base", SPECS, updatable=True)

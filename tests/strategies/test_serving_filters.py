"""Exports and deltas of the keys that matter, of tables on replicas."""

import numpy as np
import pytest
import tensorflow as tf

from filtered_models import Stream
from process_tiers import on
from strategies.replicas import of_chief
from tfrs_embed.serving import export_delta

ASKED = np.arange(120)


@pytest.mark.parametrize(
    "limits", [{"min_frequency": 2, "max_age": 2}, {"max_keys": 9}]
)
@pytest.mark.parametrize("eviction", ["lfu", None])
@on("mirrored:2", "workers:2", tier="nightly")
@on(
    "workers:2",
    tier="more",
    when=lambda eviction, limits: eviction and "max_keys" in limits,
)
def test_base_and_deltas_have_the_keys_of_one_device(
    strategy, tmp_path, eviction, limits
):
    folder = of_chief(strategy, tmp_path)
    # No shard evicts: which keys have rows doesn't depend on the shards.
    stream = Stream(strategy, eviction)
    stream.train(0, 60)
    base = folder / "base"
    stream.export(base, updatable=True, **limits)
    served, since = tf.saved_model.load(str(base)), base
    stream.assert_serves(served, stream.expected(**limits), ASKED)
    for number in (1, 2):
        stream.train(20 * number, 20 * number + 60)
        removed = stream.table.keys()[::5]
        stream.table.remove(tf.constant(removed))
        for key in removed.tolist():
            del stream.frequency[key]
        chosen = stream.expected(**limits)
        delta = folder / f"delta-{number}"
        assert export_delta(stream.layer, delta, since=since) == number
        served.apply_delta(str(delta))
        stream.assert_serves(served, chosen, ASKED)
        since = delta
    # From the export again, whose keys are no longer remembered.
    export_delta(stream.layer, folder / "late", since=base)
    late = tf.saved_model.load(str(base))
    late.apply_delta(str(folder / "late"))
    stream.assert_serves(late, chosen, ASKED)

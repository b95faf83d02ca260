"""More replicas in one process than TensorFlow's collectives can serve."""

import pytest

import tfrs_embed
from process_tiers import on

pytestmark = on("mirrored:12", tier="more")


def test_too_many_logical_cpus_are_refused(strategy):
    if strategy.num_replicas_in_sync < 12:
        pytest.skip("fewer than 12")
    table = tfrs_embed.TableConfig("movies", 50, 3)
    feature = tfrs_embed.FeatureConfig("movie", table)
    with (
        strategy.scope(),
        pytest.raises(NotImplementedError, match="at most 11 logical CPUs"),
    ):
        tfrs_embed.PartialTPUEmbedding(feature, "sgd", size_threshold=0)

"""This library's DistributedEmbedding."""

import tfrs_embed
from peers import ours


def make(case, form):
    tables = ours.make_tables(case)
    features = [
        tfrs_embed.FeatureConfig(
            f"feature_{i}",
            tables[feature.table],
            input_shape=(case.batch, feature.hotness),
            output_shape=(case.batch, tables[feature.table].embedding_dim),
        )
        for i, feature in enumerate(case.features)
    ]
    layer = tfrs_embed.DistributedEmbedding(
        features, optimizer=ours.table_optimizer(case)
    )
    return ours.make_runner(case, layer, form)

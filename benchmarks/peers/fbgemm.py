"""fbgemm's fused tables, which update themselves in the backward pass."""

import cases
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from peers import torch_steps

OPTIMIZERS = {
    "Adagrad": EmbOptimType.EXACT_ADAGRAD,
    "Adam": EmbOptimType.ADAM,
    "SGD": EmbOptimType.EXACT_SGD,
    "RowWiseAdagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def make(case, form):
    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (t.rows, t.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
            for t in case.tables
        ],
        feature_table_map=[f.table for f in case.features],
        optimizer=(
            EmbOptimType.EXACT_SGD  # The one without slots.
            if case.kind == "forward"
            else OPTIMIZERS[case.optimizer]
        ),
        learning_rate=case.learning_rate,
        eps=cases.EPSILON,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    for weights in layer.split_embedding_weights():
        torch_steps.fill(weights)
    if case.kind != "forward" and case.optimizer.endswith("Adagrad"):
        for (accumulator,) in layer.split_optimizer_states():
            accumulator.fill_(cases.INITIAL_ACCUMULATOR)

    def prepare(batch):
        lengths = [np.full(case.batch, f.hotness) for f in case.features]
        return (
            torch.from_numpy(np.concatenate([ids.ravel() for ids in batch])),
            torch.from_numpy(np.r_[0, np.cumsum(np.concatenate(lengths))]),
        )

    return torch_steps.make_runner(case, prepare, lambda x: layer(*x))

"""torchrec's tables, which update themselves in the backward pass."""

import cases
import numpy as np
import torch
import torchrec
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
)

from peers import torch_steps

# torch has none with a number for each row.
OPTIMIZERS = {"RowWiseAdagrad": torchrec.optim.RowWiseAdagrad}


def make(case, form):
    keys = [f"feature {i}" for i in range(len(case.features))]
    layer = FusedEmbeddingBagCollection(
        [
            torchrec.EmbeddingBagConfig(
                name=f"table {number}",
                embedding_dim=table.dim,
                num_embeddings=table.rows,
                feature_names=[
                    key
                    for key, feature in zip(keys, case.features, strict=True)
                    if feature.table == number
                ],
            )
            for number, table in enumerate(case.tables)
        ],
        *optimizer(case),
    )
    for bag in layer.embedding_bags.values():
        torch_steps.fill(bag.weight.data)
    if case.kind != "forward" and case.optimizer.endswith("Adagrad"):
        for slots in layer.fused_optimizer().state.values():
            for slot in slots.values():
                slot.fill_(cases.INITIAL_ACCUMULATOR)

    def prepare(batch):
        lengths = [np.full(case.batch, f.hotness) for f in case.features]
        return (
            torch.from_numpy(np.concatenate([ids.ravel() for ids in batch])),
            torch.from_numpy(np.concatenate(lengths)),
        )

    def embed(inputs):
        # Made anew, as for each batch of a program: it keeps what it computes.
        values, lengths = inputs
        features = torchrec.KeyedJaggedTensor(keys, values, lengths=lengths)
        return layer(features).values()

    return torch_steps.make_runner(case, prepare, embed)


def optimizer(case):
    """The optimizer's type and settings."""
    settings = {"lr": case.learning_rate}
    if case.kind == "forward" or case.optimizer == "SGD":
        return torch.optim.SGD, settings  # The one without slots.
    name = case.optimizer
    kind = OPTIMIZERS.get(name) or getattr(torch.optim, name)
    return kind, settings | {"eps": cases.EPSILON}

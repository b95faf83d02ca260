"""torch's own layer, with gradients of the rows that a step touches."""

import torch

from peers import torch_steps


def make(case, form):
    layers = []
    for table in case.tables:
        layer = torch.nn.EmbeddingBag(
            table.rows, table.dim, mode="sum", sparse=True
        )
        torch_steps.fill(layer.weight)
        layers.append(layer)

    def convert(ids):
        ids = torch.from_numpy(ids)
        if form == "dense":
            return (ids,)
        return ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1])

    def embed(inputs):
        activations = [
            layers[f.table](*ids)
            for f, ids in zip(case.features, inputs, strict=True)
        ]
        return activations[0] if len(inputs) == 1 else torch.cat(activations, 1)

    return torch_steps.make_runner(
        case,
        lambda batch: [convert(ids) for ids in batch],
        embed,
        [layer.weight for layer in layers],
    )

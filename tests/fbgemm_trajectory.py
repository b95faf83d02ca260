"""Writes fbgemm_trajectory.json: what FBGEMM's row-wise Adagrad does.

It needs torch and fbgemm, which the tests don't:

    pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0
    python tests/fbgemm_trajectory.py

tests/test_row_wise_adagrad.py compares with what it wrote.
"""

import importlib.metadata
import json
import pathlib

FILE = pathlib.Path(__file__).with_suffix(".json")
ROWS, DIM, BAGS = 5, 20, 4
RATE, EPSILON, INITIAL = 0.25, 0.01, 0.0


def main():
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

    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        eps=EPSILON,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.FATAL,
    )
    [weights] = layer.split_embedding_weights()
    [[accumulators]] = layer.split_optimizer_states()
    rng = np.random.default_rng(0)
    weights.copy_(torch.from_numpy(numbers(rng, [ROWS, DIM])))
    accumulators.fill_(INITIAL)
    found = {
        "made_by": {
            name: importlib.metadata.version(name)
            for name in ("torch", "fbgemm-gpu-cpu")
        },
        "learning_rate": RATE,
        "epsilon": EPSILON,
        "initial_accumulator_value": INITIAL,
        "parameters": weights.tolist(),
        "steps": [],
    }
    # Rows of several bags, one twice in a bag, one in no step, an empty bag,
    # and a gradient of zeros.
    for ids in (
        [[0, 1], [1], [3, 3, 0], []],
        [[2], [0], [], [2, 1]],
        [[1], [1, 1], [3], [0, 2]],
    ):
        gradients = numbers(rng, [BAGS, DIM])
        if not found["steps"]:
            gradients[1] = 0.0
        lengths = [len(bag) for bag in ids]
        flat = [row for bag in ids for row in bag]
        out = layer(torch.tensor(flat), torch.tensor(np.cumsum([0, *lengths])))
        out.backward(torch.from_numpy(gradients))
        found["steps"].append(
            {
                "ids": ids,
                "gradients": gradients.tolist(),
                "parameters": weights.tolist(),
                "accumulators": accumulators.reshape(ROWS).tolist(),
            }
        )
    FILE.write_text(json.dumps(found) + "\n")


def numbers(rng, shape):
    """Normal numbers of few digits, which float32 has exactly."""
    import numpy as np

    return (np.round(rng.normal(size=shape) * 64) / 64).astype(np.float32)


if __name__ == "__main__":
    main()

"""Strategies' test files: each strategy has one process for all of them.

Starting TensorFlow takes longer than many tests. Under workers it is a process
for each. A file comes with pytest's expression of what to run in it; None: all.
"""

from processes import ALL

CONFORMANCE = "conformance/test_conformance.py"
# What one device's tests don't cover already.
GRADIENTS = None if ALL else "penalty or persistent or updat"

#: On logical CPUs and on workers, by strategy.
REPLICAS = {
    "mirrored:2": {
        CONFORMANCE: None,
        "strategies/test_sharded_keras.py": None,
        "strategies/test_sharded_models.py": None,
        "strategies/test_sharded_distributed.py": None,
        "strategies/test_sharded_errors.py": None,
        "strategies/test_sharded_traffic.py": None,
        "strategies/test_sharded_all2all.py": None,
        "strategies/test_serving_export.py": "distributed or keys",
        "strategies/test_gradients_on_replicas.py": GRADIENTS,
    },
    "mirrored:4": {
        # More replicas find little in the other tests that two don't; from
        # three on, the order of a sum matters.
        CONFORMANCE: None if ALL else "many_optimizers and not tensorflow",
        "strategies/test_mirrored_engine.py": "test_training",
    },
    "workers:2": {
        CONFORMANCE: None
        if ALL
        else "(many_optimizers or sharded-adagrad-mean-weighted-all_kinds or"
        " pipelined or (pending and sgd)) and not tensorflow",
        "strategies/test_sharded_keras.py": None,
        "strategies/test_mirrored_engine.py": None,
        "strategies/test_serving_export.py": "partial or keys",
    },
    "workers:3": {
        CONFORMANCE: None if ALL else "many_optimizers and not tensorflow",
        "strategies/test_sharded_errors.py": None,
        "strategies/test_sharded_traffic.py": None,
        "strategies/test_sharded_all2all.py": None,
        "strategies/test_sharded_workers.py": None,
    },
    "mirrored:12": {"strategies/test_sharded_limits.py": None},
}

#: On emulated slices, "tpu:<chips>x<SparseCores>".
SLICES = {
    # The largest slice has the CPUs for the smaller ones, too.
    "tpu:4x4": {
        "strategies/test_tpu_loops.py": "sparse",
        # Of loops, which take longest, those of one slice.
        "strategies/test_emulated_training.py": (
            None if ALL else "not (pipelined_loops and not topology3)"
        ),
        "strategies/test_emulated_strategy.py": None,
        "strategies/test_emulated_keras.py": None,
    },
    "tpu:2x4": {
        CONFORMANCE: None,
        "strategies/test_tpu_loops.py": "dense",
        "strategies/test_tpu_embedding_cores.py": None,
        "strategies/test_gradients_on_replicas.py": GRADIENTS,
        "strategies/test_serving_export.py": "partial",
    },
    "tpu:2x2": {
        "strategies/test_tpu_keras.py": None,
        "strategies/test_tpu_distributed.py": None,
    },
}

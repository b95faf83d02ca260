"""Strategies' test files: each strategy has one process for all of them.

Starting TensorFlow takes longer than many tests. Under workers it is a process
for each. A file comes with pytest's expression of what to run in it; None: all.
"""

from processes import ALL

CONFORMANCE = "conformance/test_conformance.py"
# What one device's tests don't cover already.
GRADIENTS = None if ALL else "(penalty or persistent) and function or updat"
KERNELS = None if ALL else "not tensorflow"
# From what is on one replica, or cut into columns, to all places.
PLACEMENTS = (
    None if ALL else "not (checkpoints and (row or replicated or exported))"
)

#: On logical CPUs and on workers, by strategy.
REPLICAS = {
    "mirrored:2": {
        CONFORMANCE: KERNELS,
        "strategies/test_placements.py": PLACEMENTS,
        "strategies/test_plans.py": None,
        "strategies/test_vectors.py": None,
        "strategies/test_hashed_features.py": (
            None if ALL else "not (concat or ragged)"
        ),
        "strategies/test_hot_rows.py": None,
        "strategies/test_wire.py": (
            None if ALL else "not (rows or hidden and bfloat16)"
        ),
        "strategies/test_sharded_keras.py": (
            None if ALL else "not PartialTPUEmbedding-1"
        ),
        "strategies/test_small_tables.py": None,
        "strategies/test_sharded_models.py": (
            None if ALL else "not (saved_weights and (h5 or keras))"
        ),
        "strategies/test_sharded_distributed.py": (
            None if ALL else "not (saved_and_loaded and h5 or back and Partial)"
        ),
        "strategies/test_sharded_errors.py": None,
        "strategies/test_sharded_traffic.py": None,
        "strategies/test_measured_tables.py": None,
        "strategies/test_sharded_all2all.py": None,
        "strategies/test_row_wise_slots.py": None,
        "strategies/test_table_dtypes.py": (
            None if ALL else "bfloat16 or 6-row"
        ),
        "strategies/test_dynamic_replicas.py": (
            None if ALL else "not (reference and (ttl or lfu))"
        ),
        "strategies/test_serving_export.py": "distributed or keys",
        "strategies/test_gradients_on_replicas.py": GRADIENTS,
    },
    "mirrored:4": {
        # More replicas find little in the other tests that two don't; from
        # three on, the order of a sum matters.
        CONFORMANCE: (
            None if ALL else "many_optimizers and not (tensorflow or dynamic)"
        ),
        "strategies/test_dynamic_replicas.py": None if ALL else "lru or ttl",
        "strategies/test_mirrored_engine.py": "test_training",
        "strategies/test_vectors.py": None if ALL else "formula",
        "strategies/test_hot_rows.py": None if ALL else "model or stages",
        # Groups of two need four.
        "strategies/test_two_stages.py": (
            None if ALL else "not (dynamic or invalid)"
        ),
        "strategies/test_wire.py": None if ALL else "two_stages",
        "strategies/test_placements.py": None if ALL else "alike or formula",
        "strategies/test_plans.py": None if ALL else "bytes and mixed",
        "strategies/test_sharded_traffic.py": (
            None if ALL else "vectors and (weighted or rows)"
        ),
    },
    "workers:2": {
        CONFORMANCE: None
        if ALL
        else "(many_optimizers or sharded-adagrad-mean-weighted-all_kinds or"
        " pipelined or (pending and sgd)) and not tensorflow",
        "strategies/test_sharded_keras.py": None,
        "strategies/test_mirrored_engine.py": None,
        "strategies/test_hashed_features.py": (
            None if ALL else "mult-combined or multiplex-ragged"
        ),
        "strategies/test_hot_rows.py": None if ALL else "copies_stay",
        "strategies/test_wire.py": None
        if ALL
        else "reference or hidden and half",
        "strategies/test_dynamic_replicas.py": None
        if ALL
        else "lfu or numbers or evicted",
        "strategies/test_serving_export.py": "partial or keys",
    },
    "workers:3": {
        CONFORMANCE: None if ALL else "many_optimizers and not tensorflow",
        "strategies/test_sharded_errors.py": None,
        "strategies/test_sharded_traffic.py": None if ALL else "bytes",
        "strategies/test_sharded_all2all.py": None,
        "strategies/test_sharded_workers.py": None,
        "strategies/test_row_wise_slots.py": "has_them",
        "strategies/test_table_dtypes.py": (
            "reference" if ALL else "reference and bfloat16 and [1-"
        ),
        "strategies/test_vectors.py": None if ALL else "alike and False",
        "strategies/test_placements.py": PLACEMENTS,
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
        CONFORMANCE: KERNELS,
        "strategies/test_tpu_loops.py": "dense",
        "strategies/test_tpu_embedding_cores.py": None,
        "strategies/test_gradients_on_replicas.py": GRADIENTS,
        "strategies/test_serving_export.py": "partial",
    },
    "tpu:2x2": {
        "strategies/test_tpu_keras.py": None,
        "strategies/test_tpu_distributed.py": None,
        "strategies/test_hashed_features.py": None if ALL else "not concat",
    },
}

#: On the layers of Keras 3, by strategy. What the layers of tf_keras are tested
#: for in the same files is code that both share.
KERAS_3 = {
    "": {
        CONFORMANCE: (
            None
            if ALL
            else "(many_optimizers or pipelined or pending or optimizers or"
            " (test_training and adagrad-mean)) and not tensorflow"
        ),
        "test_keras_3_layers.py": None,
        "test_monitoring.py": "logged",
        "test_keras.py": (
            None
            if ALL
            else "not (dtype or float64 or dense_ids or one_replica or"
            " (mask and (large or distributed)) or served)"
        ),
        "test_embedding.py": None if ALL else "layer",
        "test_hashing.py": None if ALL else "stored or bad or padding and mult",
        "test_row_wise_adagrad.py": None if ALL else "files or stores or rate",
        "test_table_names.py": None if ALL else "partial",
        "test_checkpoints.py": None if ALL else "slots or not_compiled",
        "test_serving.py": None if ALL else "keras or ranker or trained",
        "test_optimizers.py": (
            None
            if ALL
            else "kernels and (keras_optimizer or accepted or assigned or saved"
            " or another_optimizer)"
        ),
        "test_gradients.py": None if ALL else "kernels and (scale or eager)",
        "test_partial.py": None if ALL else "towers and functional",
        "test_distributed_embedding.py": (
            None if ALL else "model or fit or symbolic or weights"
        ),
        "test_all2all.py": None if ALL else "keras or weights or saved",
        "test_bad_input.py": None if ALL else "keras and graph and one_bad",
        "test_initial_values.py": None if ALL else "keras",
        "test_properties.py": None if ALL else "kernels",
        "test_dynamic_checkpoints.py": None if ALL else "model and not own",
        "test_dynamic_inputs.py": None if ALL else "Dynamic or config",
        "test_dynamic_steps.py": (
            None
            if ALL
            else "kernels and (fit or predict or overflow or each_initializer)"
        ),
    },
    "mirrored:2": {
        CONFORMANCE: (
            None if ALL else "many_optimizers or (test_training and few)"
        ),
        "strategies/test_small_tables.py": None,
    },
}

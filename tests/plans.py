"""Strategies' test files: each strategy has one process for all of them.

Starting TensorFlow takes longer than many tests. Under workers it is a process
for each. A file comes with pytest's expression of what to run in it; None: all.
What `make test` has no time for is in a plan of its own, of `make test-more`.
"""

from nightly import by_day

CONFORMANCE = "conformance/test_conformance.py"
# What one device's tests don't cover already.
GRADIENTS = by_day("penalty and function or no_updates or unused")
KERNELS = by_day("not tensorflow")
# What most changes to an engine would break.
STEPS = "test_training or invalid or a_bad_id"

#: On logical CPUs and on workers, by strategy.
REPLICAS = {
    "mirrored:2": {
        CONFORMANCE: by_day(f"{KERNELS} and ({STEPS})", nightly=STEPS),
        "strategies/test_hashed_features.py": by_day("not (concat or ragged)"),
        "strategies/test_wire.py": by_day("not (rows or hidden and bfloat16)"),
        "strategies/test_norms.py": None,
        "strategies/test_sharded_keras.py": None,
        "strategies/test_small_tables.py": None,
        "strategies/test_files_of_before.py": None,
        "strategies/test_sharded_models.py": by_day(
            "not (saved_weights and (h5 or keras))"
        ),
        "strategies/test_sharded_errors.py": None,
        "strategies/test_table_dtypes.py": by_day("bfloat16 or 6-row"),
        "strategies/test_serving_export.py": "distributed or keys",
        "strategies/test_gradients_on_replicas.py": GRADIENTS,
    },
    "workers:2": {
        CONFORMANCE: by_day(
            "(many_optimizers and (dynamic or columns) or"
            " pipelined and (sharded or columns) or pending and sgd) and"
            " not tensorflow"
        ),
        "strategies/test_sharded_keras.py": None,
        "strategies/test_mirrored_engine.py": None,
        "strategies/test_hashed_features.py": by_day(
            "mult-combined or multiplex-ragged"
        ),
        "strategies/test_hot_rows.py": by_day("copies_stay and pipelined"),
        "strategies/test_norms.py": by_day("plain and mirrored or copies"),
        "strategies/test_wire.py": by_day("reference and half"),
        "strategies/test_dynamic_replicas.py": by_day("lfu or evicted"),
        "strategies/test_serving_export.py": "partial or keys",
    },
    "mirrored:12": {"strategies/test_sharded_limits.py": None},
}

#: The same, of `make test-more`.
MORE_REPLICAS = {
    "mirrored:2": {
        CONFORMANCE: by_day(
            f"{KERNELS} and not ({STEPS})", nightly=f"not ({STEPS})"
        ),
        # Checkpoints of what is on one replica, or cut into columns, go to all
        # places; four replicas have what all places do alike.
        "strategies/test_placements.py": by_day(
            "not (alike or checkpoints and (row or replicated or exported))"
        ),
        "strategies/test_plans.py": None,
        "strategies/test_vectors.py": by_day("not True"),
        "strategies/test_hot_rows.py": by_day(
            "not (every or copies_stay and plain)"
        ),
        "strategies/test_sharded_distributed.py": by_day(
            "not (saved_and_loaded and h5 or back and Partial)"
        ),
        "strategies/test_sharded_traffic.py": None,
        "strategies/test_measured_tables.py": None,
        "strategies/test_sharded_all2all.py": None,
        "strategies/test_row_wise_slots.py": None,
        "strategies/test_dynamic_replicas.py": by_day(
            "not (reference and (ttl or lfu))"
        ),
    },
    "mirrored:4": {
        # More replicas find little in the other tests that two don't; from
        # three on, the order of a sum matters.
        CONFORMANCE: by_day("many_optimizers and columns and not tensorflow"),
        "strategies/test_dynamic_replicas.py": by_day("ttl"),
        "strategies/test_mirrored_engine.py": "test_training",
        "strategies/test_vectors.py": by_day("formula"),
        "strategies/test_hot_rows.py": by_day("stages"),
        # Groups of two need four.
        "strategies/test_two_stages.py": by_day("not (dynamic or invalid)"),
        "strategies/test_wire.py": by_day("two_stages"),
        "strategies/test_placements.py": by_day("alike"),
        "strategies/test_plans.py": by_day("bytes and mixed"),
        "strategies/test_sharded_traffic.py": by_day("rows_of_all and float32"),
    },
    "workers:3": {
        CONFORMANCE: by_day("many_optimizers and columns and not tensorflow"),
        "strategies/test_sharded_errors.py": by_day("rows"),
        "strategies/test_sharded_traffic.py": by_day("formula"),
        "strategies/test_sharded_all2all.py": by_day(
            "training or full_shard or unknown"
        ),
        "strategies/test_sharded_workers.py": None,
        "strategies/test_row_wise_slots.py": by_day(
            "has_them and partial", nightly="has_them"
        ),
        "strategies/test_table_dtypes.py": by_day(
            "reference and bfloat16 and [1-", nightly="reference"
        ),
        "strategies/test_vectors.py": by_day("alike and False"),
        "strategies/test_placements.py": by_day("alike"),
    },
}

#: On emulated slices, "tpu:<chips>x<SparseCores>".
SLICES = {
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
        "strategies/test_hashed_features.py": by_day("mult and not concat"),
    },
}

#: The same, of `make test-more`.
MORE_SLICES = {
    # The largest slice has the CPUs for the smaller ones, too.
    "tpu:4x4": {
        "strategies/test_tpu_loops.py": "sparse",
        # Of loops, which take longest, those of one slice.
        "strategies/test_emulated_training.py": by_day(
            "not (pipelined_loops and not topology3)"
        ),
        "strategies/test_emulated_strategy.py": None,
        "strategies/test_emulated_keras.py": None,
    },
}

#: On the layers of Keras 3, by strategy. What the layers of tf_keras are tested
#: for in the same files is code that both share.
KERAS_3 = {
    "": {
        CONFORMANCE: by_day(
            "(many_optimizers or (test_training and adagrad-mean)) and"
            " not tensorflow"
        ),
        "test_keras_3_layers.py": None,
        "test_model_optimizer.py": None,
        "test_keras.py": by_day(
            "not (dtype or float64 or dense_ids or one_replica or"
            " mask or served or deep_copy or fill or whatever or loss_scale or"
            " empty_batch)"
        ),
        "test_embedding.py": by_day("layer"),
        "test_table_names.py": by_day("partial"),
        "test_partial.py": by_day("towers and functional"),
        "test_distributed_embedding.py": by_day(
            "model or fit or symbolic or weights"
        ),
        "test_all2all.py": by_day("keras or weights or saved"),
        "test_old_checkpoints.py": None,
        "test_bad_input.py": by_day("keras and graph and one_bad"),
        "test_conversion_matrix.py": by_day(
            "embedding or small or files_of_keras and dynamic"
        ),
    },
}

#: The same, of `make test-more`.
MORE_KERAS_3 = {
    "": {
        "test_monitoring.py": "logged",
        "test_hashing.py": by_day("stored or bad or padding and mult"),
        "test_row_wise_adagrad.py": by_day("files or stores or rate"),
        "test_checkpoints.py": by_day("slots or not_compiled"),
        "test_serving.py": by_day("keras or ranker or trained"),
        "test_optimizers.py": by_day(
            "kernels and (keras_optimizer or accepted or assigned or saved"
            " or another_optimizer)"
        ),
        "test_gradients.py": by_day("kernels and scale"),
        "test_initial_values.py": by_day("keras"),
        "test_properties.py": by_day("kernels"),
        "test_dynamic_checkpoints.py": by_day("model and not own"),
        "test_dynamic_inputs.py": by_day("Dynamic or config"),
        "test_dynamic_steps.py": by_day(
            "kernels and (fit or predict or overflow or each_initializer)"
        ),
    },
    "mirrored:2": {
        CONFORMANCE: by_day(
            "(many_optimizers and dynamic or (test_training and few))"
            " and not tensorflow"
        ),
        "strategies/test_small_tables.py": None,
    },
}

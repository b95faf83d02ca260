"""Runs tests on emulated slices, "tpu:<chips>x<SparseCores>"."""

from processes import ALL, run


def test_emulated_slices():
    # The largest slice has the CPUs for the smaller ones, too.
    run(
        {
            "strategies/test_tpu_loops.py": "sparse",
            # Of loops, which take longest, those of one slice.
            "strategies/test_emulated_training.py": (
                None if ALL else "not (pipelined_loops and not topology3)"
            ),
            "strategies/test_emulated_strategy.py": None,
            "strategies/test_emulated_keras.py": None,
        },
        "tpu:4x4",
    )


def test_layers(tmp_path):
    run(
        {
            "conformance/test_conformance.py": None,
            "strategies/test_tpu_loops.py": "dense",
            "strategies/test_tpu_embedding_cores.py": None,
            # What one device's tests don't cover already.
            "strategies/test_gradients_on_replicas.py": (
                None if ALL else "penalty or persistent or updat"
            ),
            "strategies/test_serving_export.py": "partial",
        },
        "tpu:2x4",
        TFRS_EMBED_TEST_FOLDER=str(tmp_path),
    )


def test_keras():
    run(
        {
            "strategies/test_tpu_keras.py": None,
            "strategies/test_tpu_distributed.py": None,
        },
        "tpu:2x2",
    )

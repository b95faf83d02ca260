"""Runs tests/strategies/test_checkpoints.py: save anywhere, restore anywhere.

`make nightly` takes all placements; otherwise those that differ in kind.
"""

import pytest

from nightly_flag import ALL
from run_in_processes import run
from tfrs_embed.compat.strategies import has_sparse_core_api

SLICES = ["v5p-4", *(["v6e-4"] if ALL else [])]

# By processes, which hold the placements of one machine together. A second
# MirroredStrategy would share the first one's collectives.
PROCESSES = {
    "tpu:4x4": [
        "one",
        "mirrored-2",
        # TensorFlow 2.16 lays no tables out on SparseCores.
        *(SLICES if has_sparse_core_api() else []),
    ],
    **({"mirrored:4": ["mirrored-4"]} if ALL else {}),
    "workers:2": ["workers-2"],
    **({"workers:3": ["workers-3"]} if ALL else {}),
}


@pytest.mark.more
def test_save_anywhere_restore_anywhere(tmp_path):
    def in_process(strategy, restored, test=""):
        run(
            [f"strategies/test_checkpoints.py{test}"],
            strategy,
            TFRS_EMBED_TEST_CHECKPOINTS=str(tmp_path),
            TFRS_EMBED_TEST_SAVED=" ".join(PROCESSES[strategy]),
            TFRS_EMBED_TEST_RESTORED=" ".join(restored),
        )

    done = []
    for strategy, placements in PROCESSES.items():
        done += placements
        in_process(strategy, done)
    # What was saved after they had ended.
    earlier = []
    for strategy, placements in PROCESSES.items():
        earlier += placements
        later = [p for p in done if p not in earlier]
        if later:
            in_process(strategy, later, "::test_restore")

"""Times hashing ids into rows: TensorFlow's operations beside the kernel.

Both run in turns in one process, on one thread unless `--threads` says more.
The table has the medians of all rounds. The script fails if rows differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.ops import backend

BUCKETS = 1_000_003
SALTS = {"FarmHash64": None, "SipHash64": (7, 7)}


def make_ids(number: int) -> dict[str, tf.Tensor]:
    """The ids of each case."""
    rng = np.random.default_rng(0)
    ids = {
        "integers below 10^6": tf.constant(rng.integers(0, 10**6, number)),
        "integers of 64 bits": tf.constant(
            rng.integers(-(2**63), 2**63 - 1, number)
        ),
    }
    for size in (8, 16, 40):
        letters = rng.integers(97, 123, [number, size], np.uint8)
        ids[f"strings of {size} bytes"] = tf.constant(
            letters.view(f"S{size}")[:, 0]
        )
    return ids


def seconds(ids: tf.Tensor, salt: tuple[int, int] | None) -> float:
    """The duration of a call."""
    begin = time.perf_counter()
    backend.operations(None, training=True).hash_ids(ids, BUCKETS, [salt])
    return time.perf_counter() - begin


def main() -> None:
    """Prints a table of nanoseconds an id."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--ids", type=int, default=100_000)
    add("--rounds", type=int, default=50)
    add("--threads", type=int, default=1)
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    print(kernels.status())
    print("| ids | hash | TensorFlow's, ns an id | kernel, ns an id |")
    print("|---|---|---|---|")
    for name, ids in make_ids(args.ids).items():
        for hashing, salt in SALTS.items():
            ours, theirs = [], []
            for _ in range(args.rounds):
                ours.append(seconds(ids, salt))
                with kernels.disabled():
                    theirs.append(seconds(ids, salt))
            [rows] = backend.operations(None, True).hash_ids(
                ids, BUCKETS, [salt]
            )
            with kernels.disabled():
                [wanted] = backend.operations(None, True).hash_ids(
                    ids, BUCKETS, [salt]
                )
            np.testing.assert_array_equal(rows, wanted)
            both = [
                f"{statistics.median(each) / args.ids * 1e9:.1f}"
                for each in (theirs, ours)
            ]
            print("|", " | ".join([name, hashing, *both]), "|", flush=True)


if __name__ == "__main__":
    main()

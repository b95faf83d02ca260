"""Small steps, and whether TPUs take them.

The emulated slice and TensorFlow's own TPUStrategy are both put through them,
so that what the emulation refuses is what the real one refuses.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

BATCH = np.arange(1, 33, dtype=np.float32).reshape(8, 4)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a replica.

    `error` is what the error of both says, or None; `on_host` a kind of
    operation that the host has to run, which is an error without soft
    placement.
    """

    run: Callable
    error: str | None = None
    on_host: str | None = None


def _reduce(how, dtype):
    def run(x):
        context = tf.distribute.get_replica_context()
        return context.all_reduce(how, tf.cast(x, dtype))

    return run


def _merged_sum(x):
    def merged(strategy, values):
        device = strategy.extended.worker_devices[0]
        return strategy.extended.reduce_to("SUM", values, device)

    context = tf.distribute.get_replica_context()
    return context.merge_call(merged, (tf.cast(x, tf.int64),))


def _sum_of_rows(x):
    """The gradient of some rows, as of a Keras Embedding."""
    rows = tf.IndexedSlices(x, tf.range(8), tf.constant([8, 4]))
    context = tf.distribute.get_replica_context()
    found = context.all_reduce("SUM", rows)
    assert isinstance(found, tf.Tensor)  # Optimizers get dense gradients.
    return found


def _branch(x):
    return tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: tf.histogram_fixed_width(x, [0.0, 9.0]),
        lambda: tf.zeros([100], tf.int32),
    )


def _print(x):
    tf.print(x)
    return x


STEPS = {
    "add": Step(lambda x: x + 1.0),
    "sort": Step(lambda x: tf.sort(x)),
    "float64": Step(lambda x: tf.cast(x, tf.float64) * 2.0),
    "unique": Step(lambda x: tf.size(tf.unique(tf.reshape(x, [-1]))[0])),
    "mask": Step(lambda x: tf.reduce_sum(tf.boolean_mask(x, x > 3.0))),
    "int64": Step(lambda x: tf.cast(x, tf.int64) // 3),
    "random": Step(lambda x: x + tf.random.uniform([8, 4])),
    "print": Step(_print, on_host="PrintV2"),
    "strings": Step(
        lambda x: tf.strings.length(tf.strings.as_string(x)),
        on_host="AsString",
    ),
    "histogram": Step(
        lambda x: tf.histogram_fixed_width(x, [0.0, 9.0]),
        on_host="HistogramFixedWidth",
    ),
    "branch": Step(_branch, on_host="HistogramFixedWidth"),
    "segment_sum": Step(
        lambda x: tf.math.segment_sum(x, tf.range(8)), on_host="SegmentSum"
    ),
    "bincount": Step(
        lambda x: tf.math.bincount(tf.cast(x, tf.int32)),
        on_host="DenseBincount",
    ),
    **{
        f"sum_{dtype.name}": Step(_reduce("SUM", dtype))
        for dtype in (tf.float32, tf.bfloat16, tf.float64, tf.int32, tf.uint32)
    },
    **{
        f"sum_{dtype.name}": Step(
            _reduce("SUM", dtype), error=f"{dtype.name}.*float16"
        )
        for dtype in (tf.int64, tf.int16, tf.int8, tf.uint8, tf.bool)
    },
    **{
        f"mean_{dtype.name}": Step(_reduce("MEAN", dtype))
        for dtype in (tf.float32, tf.bfloat16)
    },
    **{
        f"mean_{dtype.name}": Step(_reduce("MEAN", dtype), error=dtype.name)
        for dtype in (tf.int32, tf.uint32, tf.int64)
    },
    "sum_of_rows": Step(_sum_of_rows),
    "merged_sum": Step(_merged_sum, error=r"int64.*float16"),
}


def traced(strategy, step):
    """A function that runs a step on all replicas."""

    @tf.function
    def function(x):
        return strategy.run(step.run, (x,))

    return function

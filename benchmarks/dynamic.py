"""Times tables whose keys come and go, beside what is used in their place.

    python benchmarks/dynamic.py --parts steps drift

steps: whole training steps in turns, of samples of --width keys that follow a
power law: a static table, whose ids are numbers of rows; the same ids as keys
spread over 2^63; full tables that evict, where --new of all keys are new ones;
and Keras's IntegerLookup with buckets for what it doesn't know, and its
DynamicEmbedding, whose vocabularies don't change in a step.
drift: --steps steps of a stream whose ids move by a hundredth of the vocabulary
every hundred steps: memory, and the longest steps, beside those of a static
table that has steps of the same ids in turns.
"""

import argparse
import itertools
import os
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf
import tf_keras
from key_streams import MIXER, Ids, memory, moved

import tfrs_embed

RATE = 0.01


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = ("steps", "drift")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--width", type=int, default=10, help="keys a sample")
    parser.add_argument("--new", type=float, default=0.01)
    parser.add_argument("--floor", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--each", type=int, default=20, help="steps in a round")
    parser.add_argument("--steps", type=int, default=20_000, help="of drift")
    return parser.parse_args()


def model(args, keys=None, rows=None):
    """A layer of one table, and its training step."""
    table = tfrs_embed.TableConfig(
        "items",
        rows or args.rows,
        args.dim,
        initializer="uniform",
        combiner="sum",
        keys=keys,
    )
    feature = tfrs_embed.FeatureConfig("items", table)
    optimizer = tf_keras.optimizers.Adagrad(RATE)
    layer = tfrs_embed.PartialTPUEmbedding(feature, optimizer)
    layer.build(None)
    return layer, training_step(layer, lambda ids: layer(ids, training=True))


def training_step(layer, vectors_of, optimizer=None):
    optimizer = optimizer or tf_keras.optimizers.SGD(RATE)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            vectors = vectors_of(tf.RaggedTensor.from_tensor(ids))
            loss = tf.reduce_sum(tf.square(vectors))
        variables = layer.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def full(layer, ids):
    """Gives rows to the keys of the first ids."""
    layer.tables["items"].give_rows(ids.key[: ids.args.rows])


def integer_lookup(args, ids):
    """Keras's: a vocabulary that was learnt before, a tenth of it buckets."""
    lookup = tf_keras.layers.IntegerLookup(
        vocabulary=ids.key[: args.rows * 9 // 10],
        num_oov_indices=args.rows // 10,
    )
    embedding = tf_keras.layers.Embedding(args.rows, args.dim)
    embedding.build(None)

    def vectors_of(keys):
        found = embedding(lookup(keys.values))
        return tf.math.segment_sum(found, keys.value_rowids())

    optimizer = tf_keras.optimizers.Adagrad(RATE)
    return training_step(embedding, vectors_of, optimizer)


def keras_dynamic(args, ids):
    """Keras's DynamicEmbedding, which counts on the way, without callbacks."""
    layer = tf_keras.layers.experimental.DynamicEmbedding(
        args.rows,
        args.dim,
        tf.constant(ids.key[: args.rows]),
    )

    def vectors_of(keys):
        found = layer(keys.values[:, None])[:, 0]
        return tf.math.segment_sum(found, keys.value_rowids())

    return training_step(layer, vectors_of, tf_keras.optimizers.Adagrad(RATE))


def contenders(args, ids):
    """Each contender's step, and what draws its ids."""
    keys = tfrs_embed.DynamicKeys

    def known():
        return ids.key[ids.draw()]

    yield "static table", model(args)[1], ids.draw
    layer, step = model(args, keys(eviction=None))
    full(layer, ids)
    yield "dynamic, all keys known", step, known
    for rule in ("lru", "lfu"):
        layer, step = model(args, keys(eviction=rule))
        full(layer, ids)
        yield f"dynamic, full, {rule}", step, ids.with_new
    layer, step = model(args, keys(eviction="lru", floor=args.floor))
    full(layer, ids)
    yield f"dynamic, full, lru, floor {args.floor}", step, ids.with_new
    # New keys find free rows, in as many steps as are timed.
    layer, step = model(args, keys(eviction="lru"), 2 * args.rows)
    full(layer, ids)
    yield "dynamic, room for new keys", step, ids.with_new
    admission = tfrs_embed.FrequencyAdmission(3)
    layer, step = model(args, keys(eviction="lru", admission=admission))
    full(layer, ids)
    yield "dynamic, full, lru, 3 to enter", step, ids.with_new
    yield "IntegerLookup + Embedding", integer_lookup(args, ids), ids.with_new
    try:
        step = keras_dynamic(args, ids)
        step(tf.constant(known()))
    except tf.errors.ResourceExhaustedError:
        # It compares each key with all of the vocabulary at once.
        print("Keras's DynamicEmbedding: needs more memory than there is")
    else:
        yield "Keras's DynamicEmbedding", step, known


def steps(args):
    ids = Ids(args)
    found = list(contenders(args, ids))
    times = {name: [] for name, _, _ in found}
    for round_ in range(args.rounds + 1):
        for name, step, draw in found:
            slow = name.startswith(("Keras", "Integer"))
            batches = [
                tf.constant(draw()) for _ in range(2 if slow else args.each)
            ]
            for batch in batches:
                begin = time.perf_counter()
                step(batch)
                if round_:
                    times[name].append(time.perf_counter() - begin)
    first = np.median(next(iter(times.values())))
    print(
        f"{'contender':32} {'ms':>8} {'ratio':>6} {'mean ms':>8} {'p99 ms':>8}"
    )
    for name, each in times.items():
        median, slow = np.median(each), np.percentile(each, 99)
        print(
            f"{name:32} {1e3 * median:8.2f} {median / first:6.2f} "
            f"{1e3 * np.mean(each):8.2f} {1e3 * slow:8.2f}"
        )


def drift(args):
    ids = Ids(args)
    layer, step = model(args, tfrs_embed.DynamicKeys(eviction="lru"))
    _, static_step = model(args)
    sizes, times, static_times = [], [], []
    # Not made on the way: that would be timed by what it does to the caches.
    drawn = [ids.draw() for _ in range(200)]
    for i, batch in zip(
        range(args.steps), itertools.cycle(drawn), strict=False
    ):
        ids_now = moved(batch, i, args.rows)
        for times_of, step_of, given in (
            (times, step, ids_now * MIXER + 1),
            (static_times, static_step, ids_now % args.rows),
        ):
            keys = tf.constant(given)
            begin = time.perf_counter()
            step_of(keys)
            times_of.append(time.perf_counter() - begin)
        if i % 100 == 99:
            sizes.append(memory())
    table = layer.tables["items"]
    half = len(sizes) // 2
    print(f"keys {table.size:,} of {table.capacity:,}; {table.statistics()}")
    print(
        f"memory MiB: after 100 steps {sizes[0] >> 20}, half of them "
        f"{sizes[half] >> 20}, at the end {sizes[-1] >> 20} "
        f"({sizes[-1] / sizes[half] - 1:+.2%} in the second half)"
    )
    for name, each in (("dynamic", times), ("static", static_times)):
        median = np.median(each[len(each) // 2 :])
        longest = np.sort(each[100:])[::-1][:5]
        print(
            f"{name} step ms: median {1e3 * median:.2f}, longest after the "
            f"first hundred {', '.join(f'{1e3 * t:.1f}' for t in longest)} "
            f"({longest[0] / median:.1f}x)"
        )


def main():
    args = parse()
    for part in args.parts:
        print(f"== {part}", flush=True)
        {"steps": steps, "drift": drift}[part](args)


if __name__ == "__main__":
    main()

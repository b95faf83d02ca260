"""Times an unrelated Keras model and tapes beside `tfrs_embed`.

    python benchmarks/import_cost.py

In turns of processes, a plain program, one that imports `tfrs_embed` as well,
and one that has also made and trained a layer of it. Printed are medians over
processes of each one's best time: a step of a plain Keras model, and one of
10,000 small tapes; and the ratios to the plain program, which are to be within
2% of 1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

KINDS = ("plain", "imported", "layer")


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tapes", type=int, default=10_000)
    # A process's own.
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def use_a_layer():
    import tensorflow as tf
    import tf_keras

    import tfrs_embed

    table = tfrs_embed.TableConfig("table", 20_000, 16)
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("feature", table),
        tf_keras.optimizers.Adagrad(0.1),
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1, 2])))
    tape.gradient(loss, layer.trainable_variables)
    return layer


def measure(args):
    """Prints the best of five times of a step and of a tape, in us."""
    import tensorflow as tf
    import tf_keras

    kept = None
    if args.kind == "imported":
        import tfrs_embed  # noqa: F401
    elif args.kind == "layer":
        kept = use_a_layer()
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(64, "relu"), tf_keras.layers.Dense(1)]
    )
    model.compile(tf_keras.optimizers.Adam(), "mse")
    x, y = tf.random.normal([64, 32]), tf.random.normal([64, 1])
    variable = tf.Variable(1.0)

    def steps():
        for _ in range(args.steps):
            model.train_on_batch(x, y)

    def tapes():
        for _ in range(args.tapes):
            with tf.GradientTape() as tape:
                square = variable * variable
            tape.gradient(square, variable)

    found = {}
    for function, count in ((steps, args.steps), (tapes, args.tapes)):
        function()
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            function()
            times.append(time.perf_counter() - begin)
        found[function.__name__] = min(times) / count * 1e6
    del kept
    print(json.dumps(found))


def main():
    args = parse()
    if args.kind:
        measure(args)
        return
    found = {kind: [] for kind in KINDS}
    for _ in range(args.turns):
        for kind in KINDS:
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--kind", kind],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            found[kind].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'':10}{'step, us':>12}{'':8}{'tape, us':>12}")
    plain = {}
    for kind in KINDS:
        cells = []
        for name in ("steps", "tapes"):
            value = statistics.median(each[name] for each in found[kind])
            plain.setdefault(name, value)
            cells.append(f"{value:12.1f}{value / plain[name]:8.3f}")
        print(f"{kind:10}{''.join(cells)}")


if __name__ == "__main__":
    main()

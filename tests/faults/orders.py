"""A job of two layers, of which worker 1 does something else."""

import argparse
import json
import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import tensorflow as tf

from faults.job import PLACEMENTS, begin, make_layer, make_tables

STEPS = 2
#: What worker 1 does.
FAULTS = (
    "builds in another order",
    "builds one more at first",
    "builds one more at last",
    "builds one less",
    "calls in another order",
    "calls one more at first",
    "calls one more at last",
    "calls one less",
    "calls the second in another order",
    "looks up one more at last",
    "runs without kernels",
)


def main():
    parser = argparse.ArgumentParser()
    placements = [*PLACEMENTS, "variables"]
    parser.add_argument("--placement", choices=placements, required=True)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    args = parser.parse_args()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    fault = args.fault if worker == 1 else ""
    if fault == "runs without kernels":
        os.environ["TFRS_EMBED_KERNELS"] = "off"
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    built = {
        "builds in another order": ["item", "user"],
        "builds one more at first": ["more", "user", "item"],
        "builds one more at last": ["user", "item", "more"],
        "builds one less": ["user"],
    }.get(fault, ["user", "item"])
    # What it calls all have built.
    if "calls one more" in args.fault or "looks up" in args.fault:
        built = ["user", "item", "more"]
    called = {
        "builds one less": ["user"],
        "calls in another order": ["item", "user"],
        "calls one more at first": ["more", "user", "item"],
        "calls one more at last": ["user", "item", "more"],
        "calls one less": ["user"],
        "looks up one more at last": ["user", "item", "more"],
    }.get(fault, ["user", "item"])
    tables = make_tables(args.placement)
    begin("building")
    with strategy.scope():
        layers = {
            name: make_layer(args.placement, tables, "adagrad", name)
            for name in built
        }
        for layer in layers.values():
            layer.build()
    training = "looks up" not in args.fault
    variables = [v for i in layers.values() for v in i.trainable_variables]

    def step(i):
        # No longer the first time that they are called.
        again = fault == "calls the second in another order" and i > 0
        with tf.GradientTape() as tape:
            loss = 0.0
            for name in reversed(called) if again else called:
                ids = {n: tf.constant([1, 2]) for n in tables}
                for vectors in layers[name](ids, training=training).values():
                    loss += tf.reduce_sum(vectors)
        if training:
            tape.gradient(loss, variables)
        return loss

    for i in range(STEPS):
        begin("step")
        strategy.run(tf.function(lambda i=i: step(i)))


if __name__ == "__main__":
    main()

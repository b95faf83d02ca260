"""Times tables that evict keys beside those of TFRA and torchrec, on CPUs.

    python benchmarks/dynamic_peers.py --tfra PYTHON --torchrec PYTHON
    python benchmarks/dynamic_peers.py --tfra PYTHON --torchrec PYTHON \
        --rows 20000000 --dim 16 --alone

PYTHON are the interpreters of virtual environments with the peers:

    pip install tensorflow-recommenders-addons==0.8.1 tf_keras==2.16.0
    pip install torch==2.14.1 fbgemm-gpu-cpu==1.9.0
    pip install --no-deps torchrec==1.9.2
    pip install tensordict torchmetrics==1.0.3 pyre-extensions tqdm

All have --rows rows, Adagrad, and the same steps, of samples of --width keys
that are summed. First steps with each of --rows keys fill the table: bytes a
key are by how much the process's memory has grown then, slots included. Then
they take steps in turns, in which --new of all keys are new and others have to
go; with --alone one contender ends before the next begins. At last each takes
--events keys of a stream that moves, and memory is read after each step.

- ours: `DynamicKeys(eviction="lru")`. A step that lacks rows evicts as many
  keys as it needs.
- TFRA: a `BasicEmbedding` with `TimestampRestrictPolicy`, whose table grows: it
  is cut back to --rows keys when it has a tenth more.
- torchrec: an `MCHManagedCollisionModule` with `LRU_EvictionPolicy`, and
  fbgemm's table, with which torchrec trains on CPUs. New keys wait for rows
  for --interval steps, and until then share one. Its newer
  `HashZchManagedCollisionModule` is no contender: on CPUs it only reads.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
from contenders import Contender
from key_streams import MIXER, Ids, memory, moved

RATE = 0.01
NAMES = ("ours", "TFRA", "torchrec")


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, default=1_000_000)
    add("--dim", type=int, default=64)
    add("--batch", type=int, default=8192)
    add("--width", type=int, default=10, help="keys a sample")
    add("--new", type=float, default=0.01)
    add("--rounds", type=int, default=10)
    add("--each", type=int, default=20, help="steps in a round")
    add("--events", type=int, default=20_000_000, help="keys of the stream")
    add("--interval", type=int, default=10, help="torchrec's, of evictions")
    add("--alone", action="store_true", help="one contender after the other")
    add("--contenders", nargs="+", choices=NAMES, default=NAMES)
    add("--tfra", metavar="PYTHON", default=sys.executable)
    add("--torchrec", metavar="PYTHON", default=sys.executable)
    # A process's own.
    add("--contender", help=argparse.SUPPRESS)
    return parser.parse_args()


def load_ours(args, rows):
    """Returns a step, and what counts the table's keys."""
    import dynamic
    import tensorflow as tf

    import tfrs_embed

    given = argparse.Namespace(**{**vars(args), "rows": rows})
    keys = tfrs_embed.DynamicKeys(eviction="lru")
    layer, step = dynamic.model(given, keys)
    return (
        lambda ids: float(step(tf.constant(ids))),
        lambda: layer.tables["items"].size,
    )


def load_tfra(args, rows):
    """As `load_ours`, of TFRA."""
    import tensorflow as tf
    from tensorflow_recommenders_addons import dynamic_embedding as de

    initializer = tf.keras.initializers.RandomUniform(seed=1)
    layer = de.keras.layers.BasicEmbedding(
        args.dim,
        initializer=initializer,
        init_capacity=rows,
        restrict_policy=de.TimestampRestrictPolicy,
        name=f"items_{rows}",
    )
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adagrad(RATE))

    @tf.function
    def train(ids):
        with tf.GradientTape() as tape:
            vectors = layer(tf.reshape(ids, [-1]))
            shape = [-1, args.width, args.dim]
            sums = tf.reduce_sum(tf.reshape(vectors, shape), 1)
            loss = tf.reduce_sum(tf.square(sums))
        variables = layer.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def step(ids):
        loss = float(train(tf.constant(ids)))
        layer.params.restrict(num_reserved=rows, trigger=rows + rows // 10)
        return loss

    return step, lambda: int(layer.params.size())


def load_torchrec(args, rows):
    """As `load_ours`, of torchrec and fbgemm."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from torchrec.modules.mc_modules import (
        LRU_EvictionPolicy,
        MCHManagedCollisionModule,
    )
    from torchrec.sparse.jagged_tensor import JaggedTensor

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, args.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=RATE,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    [weights] = table.split_embedding_weights()
    weights.data.uniform_(-0.05, 0.05)
    keys = MCHManagedCollisionModule(
        zch_size=rows,
        device=torch.device("cpu"),
        eviction_policy=LRU_EvictionPolicy(),
        eviction_interval=args.interval,
    )
    keys.train()
    [accumulator] = table.split_optimizer_states()[0]

    def step(ids):
        values = torch.from_numpy(ids.reshape(-1))
        offsets = torch.arange(0, len(values) + 1, args.width)
        features = {"items": JaggedTensor(values, offsets=offsets)}
        found = keys.remap(keys.profile(features))["items"].values()
        loss = table(found, offsets).square().sum()
        loss.backward()
        evicted = keys.evict()
        if evicted is not None:  # The sharded module of torchrec resets them.
            weights.data[evicted] = torch.empty(
                len(evicted), args.dim
            ).uniform_(-0.05, 0.05)
            accumulator[evicted] = 0
        return float(loss.detach())

    return step, lambda: rows - int(keys.open_slots())


class Worker:
    """A contender's table in this process."""

    def __init__(self, args):
        self.args = args
        self.ids = Ids(args)
        load = {
            "ours": load_ours,
            "TFRA": load_tfra,
            "torchrec": load_torchrec,
        }[args.contender]
        # What a library takes by itself, and for a step, isn't the table's.
        step, _ = load(args, args.batch * args.width)
        for _ in range(3):
            step(self.ids.with_new())
        del step
        gc.collect()
        self.before = memory()
        self.step, self.count = load(args, args.rows)

    def fill(self):
        """Takes steps of all keys; returns bytes and keys."""
        size = self.args.batch * self.args.width
        keys = self.ids.key[: self.args.rows]
        batches = range(0, len(keys), size)
        # The last ones of torchrec have their rows --interval steps later.
        count = len(batches) + self.args.interval
        for start in itertools.islice(itertools.cycle(batches), count):
            batch = np.resize(keys[start : start + size], size)
            self.step(batch.reshape(-1, self.args.width))
        return {"bytes": memory() - self.before, "keys": self.count()}

    def steps(self, count):
        """Takes steps; returns the seconds of each."""
        batches = [self.ids.with_new() for _ in range(count)]
        found = []
        for batch in batches:
            begin = time.perf_counter()
            loss = self.step(batch)
            found.append(time.perf_counter() - begin)
            assert np.isfinite(loss)
        return found

    def stream(self, events):
        """Takes a stream's steps; returns memory after each, and seconds."""
        drawn = [self.ids.draw() for _ in range(50)]
        sizes, seconds = [], 0.0
        for i in range(-(-events // drawn[0].size)):
            # A step's ids move by a hundredth of the rows.
            batch = moved(drawn[i % len(drawn)], 100 * i, self.args.rows)
            keys = batch * MIXER + 1
            begin = time.perf_counter()
            self.step(keys)
            seconds += time.perf_counter() - begin
            sizes.append(memory())
        return {"bytes": sizes, "seconds": seconds, "keys": self.count()}


def answer(args):
    """Answers lines of a method's name and arguments with its result."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries' output must not get between the messages.
    worker = Worker(args)
    for line in sys.stdin:
        name, *given = json.loads(line)
        print(json.dumps(getattr(worker, name)(*given)), file=channel)
        channel.flush()


def start(name, args):
    """Starts a contender's process."""
    pythons = {"TFRA": args.tfra, "torchrec": args.torchrec}
    options = ["--contender", name]
    for option in ("rows", "dim", "batch", "width", "new", "interval"):
        options += [f"--{option}", str(getattr(args, option))]
    return Contender(*options, python=pythons.get(name))


def compare(names, args):
    """Prints a line for each of some contenders, which take turns."""
    processes = {name: start(name, args) for name in names}
    filled, times, streams = {}, {}, {}

    def ask(name, *line):
        process = processes[name]
        return process.begin(process.ask, json.dumps(line))

    for name in names:
        filled[name], times[name] = ask(name, "fill"), []
    for round_ in range(args.rounds + 1):
        for name, process in processes.items():
            found = process.missing or ask(name, "steps", args.each)
            if round_ and not process.missing:
                times[name] += found
    for name, process in processes.items():
        if not process.missing:
            streams[name] = ask(name, "stream", args.events)
        process.close()
    for name, process in processes.items():
        if process.missing:
            print(f"{name}: missing: {process.missing}", flush=True)
            continue
        keys, size = filled[name]["keys"], filled[name]["bytes"]
        each, sizes = np.array(times[name]), streams[name]["bytes"]
        half = len(sizes) // 2
        print(
            f"{name:10} {1e3 * np.median(each):9.1f} {1e3 * each.mean():9.1f} "
            f"{1e3 * each.max():9.1f} {keys:12,} {size / keys:8.0f} "
            f"{streams[name]['seconds']:9.1f} {sizes[half] >> 20:9,} "
            f"{sizes[-1] >> 20:9,} {sizes[-1] / sizes[half] - 1:+8.2%}",
            flush=True,
        )


def main():
    args = parse()
    if args.contender:
        answer(args)
        return
    print(
        f"{args.rows:,} rows of {args.dim}, {args.batch:,} x {args.width} keys "
        f"a step, {args.new:.0%} new; a stream of {args.events:,} keys"
    )
    print(
        f"{'':10} {'ms':>9} {'mean ms':>9} {'most ms':>9} {'keys':>12} "
        f"{'B a key':>8} {'stream s':>9} {'half MiB':>9} {'end MiB':>9} "
        f"{'growth':>8}"
    )
    names = list(args.contenders)
    for group in [[name] for name in names] if args.alone else [names]:
        compare(group, args)


if __name__ == "__main__":
    main()

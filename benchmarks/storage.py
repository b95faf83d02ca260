"""Times training steps of a table that is larger than memory.

    sudo python benchmarks/storage.py --folder /on/the/disk --times 4

Each contender trains a table of --rows rows of --dim float32 with Adagrad, by
batches of the same ids, in a process of its own. All but "memory" are in a
control group whose memory, the files' pages in it included, is the process's
own and a --times-th of the table's with its slots. They go in turns:

    memory      our layer, the table in memory, without a limit
    files       our layer with a FileStorage
    prefetch    the same, and layer.prefetch
    keys        our layer with DynamicKeys, all in memory, without a limit
    spill       the same with a spill: about half of the memory has rows, the
                other half the keys of all rows, and pages of the file
    spill_prefetch  the same, and layer.prefetch
    memmap      numpy.memmap, without reading pages ahead, and numpy
    rocksdb     a RocksDB of rows, by rocksdict

Ids are Zipf-distributed, with --order "rank" numbered by how frequent they are
(as vocabularies made by counting are), with "random" by no order; or uniform.
"""

import argparse
import json
import mmap
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

CONTENDERS = (
    *("memory", "files", "prefetch", "keys", "spill", "spill_prefetch"),
    *("memmap", "rocksdb"),
)
# The bytes that a key takes, with its place, wherever its row is.
KEY_BYTES = 48
RATE, INITIAL = 0.1, 0.1
EXPONENT = 1.05


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096, help="ids of a step")
    parser.add_argument("--times", type=float, default=4)
    parser.add_argument(
        "--order", choices=("rank", "random", "uniform"), default="rank"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="of a turn")
    # A process's own.
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    return parser.parse_args()


def batches(args):
    """Yields batches of ids, [batch] int64."""
    rng = np.random.default_rng(0)
    # The integral of x^-s, inverted.
    power = 1 - EXPONENT
    end = (args.rows + 1.0) ** power
    while True:
        if args.order == "uniform":
            yield rng.integers(0, args.rows, args.batch)
            continue
        drawn = 1 + rng.random(args.batch) * (end - 1)
        ids = np.minimum(drawn ** (1 / power) - 1, args.rows - 1)
        ids = ids.astype(np.int64)
        # A prime, so that no two ids become one.
        yield ids if args.order == "rank" else ids * 2_654_435_761 % args.rows


def limit(args):
    """The memory of a contender with a limit, beside the process's own."""
    return 2 * args.rows * args.dim * 4 / args.times


def rows_in_memory(args):
    """How many rows of a table with a spill are in memory."""
    return int(limit(args) / 2 / (2 * args.dim * 4 + KEY_BYTES))


def layer_step(args):
    """Returns what makes a step of our layer."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf
    import tf_keras

    import tfrs_embed

    storage = keys = None
    rows = args.rows
    if args.contender not in ("memory", "keys"):
        storage = tfrs_embed.FileStorage(f"{args.folder}/{args.contender}")
    if args.contender == "keys":
        keys = tfrs_embed.DynamicKeys(eviction="lfu")
    elif args.contender.startswith("spill"):
        keys = tfrs_embed.DynamicKeys(eviction="lfu", spill=storage)
        storage = None
        rows = rows_in_memory(args)
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig(
            "f",
            tfrs_embed.TableConfig(
                "t",
                rows,
                args.dim,
                tf_keras.initializers.RandomUniform(-0.01, 0.01),
                storage=storage,
                keys=keys,
            ),
        ),
        tf_keras.optimizers.Adagrad(RATE, initial_accumulator_value=INITIAL),
        size_threshold=0,
    )
    layer.build(None)
    if keys is not None:
        layer.tables["t"].give_rows(np.arange(args.rows))
    dataset = tf.data.Dataset.from_generator(
        lambda: batches(args),
        output_signature=tf.TensorSpec([args.batch], tf.int64),
    )
    if args.contender.endswith("prefetch"):
        dataset = layer.prefetch(dataset, batches=8)
    else:
        dataset = dataset.prefetch(8)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) ** 2)
        tape.gradient(loss, layer.trainable_variables)

    given = iter(dataset)
    return lambda: step(next(given))


def rows_step(args, read, write):
    """Returns what makes a step by functions that read and write rows."""
    given = batches(args)

    def step():
        ids, counts = np.unique(next(given), return_counts=True)
        rows, sums = read(ids)
        gradients = 2 * rows * counts[:, None].astype(np.float32)
        sums += gradients**2
        rows -= RATE * gradients / (np.sqrt(sums) + 1e-7)
        write(ids, rows, sums)

    return step


def initial(args):
    """Yields blocks of initial rows: the first row, and the rows."""
    rng = np.random.default_rng(1)
    for start in range(0, args.rows, 100_000):
        shape = (min(100_000, args.rows - start), args.dim)
        yield start, rng.uniform(-0.01, 0.01, shape).astype(np.float32)


def memmap_step(args):
    shape = (args.rows, args.dim)
    made = [
        np.memmap(f"{args.folder}/memmap_{name}", np.float32, "w+", shape=shape)
        for name in ("rows", "sums")
    ]
    for array in made:
        array._mmap.madvise(mmap.MADV_RANDOM)
    for start, values in initial(args):
        made[0][start : start + len(values)] = values
        made[1][start : start + len(values)] = INITIAL

    def write(ids, *values):
        for array, value in zip(made, values, strict=True):
            array[ids] = value

    return rows_step(args, lambda ids: [array[ids] for array in made], write)


def rocksdb_step(args):
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    database = rocksdict.Rdict(f"{args.folder}/rocksdb", options)
    for start, values in initial(args):
        batch = rocksdict.WriteBatch(raw_mode=True)
        for i, row in enumerate(values, start):
            record = np.append(row, np.full_like(row, INITIAL))
            batch.put(i.to_bytes(8, "big"), record.tobytes())
        database.write(batch)
    database.flush()

    def read(ids):
        found = database[[i.to_bytes(8, "big") for i in ids.tolist()]]
        records = np.frombuffer(b"".join(found), np.float32)
        records = records.reshape(len(ids), 2, args.dim)
        return records[:, 0].copy(), records[:, 1].copy()

    def write(ids, rows, sums):
        records = np.stack([rows, sums], 1)
        batch = rocksdict.WriteBatch(raw_mode=True)
        for i, record in zip(ids.tolist(), records, strict=True):
            batch.put(i.to_bytes(8, "big"), record.tobytes())
        database.write(batch)

    return rows_step(args, read, write)


class Group:
    """A control group, of either version, in which this process is."""

    def __init__(self):
        root = pathlib.Path("/sys/fs/cgroup")
        old = (root / "memory").is_dir()
        folder = root / "memory" if old else root
        self._folder = folder / f"tfrs-embed-{os.getpid()}"
        self._folder.mkdir()
        name = "memory.limit_in_bytes" if old else "memory.max"
        self._limit = self._folder / name
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, number):
        """Limits the memory beyond the process's own, in bytes."""
        text = pathlib.Path("/proc/self/status").read_text()
        [own] = re.findall(r"RssAnon:\s*(\d+) kB", text)
        self._limit.write_text(str(int(own) * 1024 + int(number)))


def answer(args):
    """Answers a number of seconds with a turn's figures."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries' output must not get between the messages.
    group = Group() if args.contender not in ("memory", "keys") else None
    kinds = {"memmap": memmap_step, "rocksdb": rocksdb_step}
    step = kinds.get(args.contender, layer_step)(args)
    step()
    if group is not None:
        more = limit(args)
        if args.contender.startswith("spill"):
            # These are the process's own already.
            more -= rows_in_memory(args) * 2 * args.dim * 4
            more -= args.rows * KEY_BYTES
        group.limit(more)
    print(json.dumps(None), file=channel, flush=True)
    for line in sys.stdin:
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.time()
        steps = 0
        while time.time() - start < float(line):
            step()
            steps += 1
        seconds = time.time() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        figures = {
            "ms": 1e3 * seconds / steps,
            "read": 512 * (after.ru_inblock - before.ru_inblock) / steps,
            "written": 512 * (after.ru_oublock - before.ru_oublock) / steps,
        }
        print(json.dumps(figures), file=channel, flush=True)


class Process:
    """A contender's process."""

    def __init__(self, contender, folder):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [
                *(sys.executable, __file__, *sys.argv[1:]),
                *("--contender", contender, "--folder", folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        self._read()

    def turn(self, seconds):
        print(seconds, file=self._process.stdin, flush=True)
        return self._read()

    def close(self):
        self._process.communicate()

    def _read(self):
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            sys.exit(self._log.read())
        return json.loads(line)


def main():
    args = parse()
    if args.contender:
        answer(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        processes = {n: Process(n, folder) for n in args.contenders}
        figures = {name: [] for name in processes}
        for process in processes.values():
            process.turn(args.seconds)  # Until the pages in use are there.
        for _ in range(args.rounds):
            for name, process in processes.items():
                figures[name].append(process.turn(args.seconds))
        for process in processes.values():
            process.close()
    print("| contender | ms a step | kB read | kB written |")
    print("|---|---:|---:|---:|")
    for name, turns in figures.items():
        ms, read, written = (
            np.median([turn[key] for turn in turns])
            for key in ("ms", "read", "written")
        )
        print(
            f"| {name} | {ms:.2f} | {read / 1e3:,.0f} | {written / 1e3:,.0f} |"
        )


if __name__ == "__main__":
    main()

"""Times training steps of a table that is larger than memory.

    sudo python benchmarks/storage.py --folder /on/the/disk --times 4
    sudo python benchmarks/storage.py --folder /on/the/disk --growth --chart F

Each contender trains a table of --rows rows of --dim float32 with Adagrad, by
batches of the same ids, in a process of its own. All but "memory" are in a
control group whose memory, the files' pages in it included, is the process's
own and a --times-th of the table's with its slots. They go in turns:

    memory      our layer, the table in memory, without a limit
    files       our layer with a FileStorage
    prefetch    the same, and layer.prefetch
    keys        our layer with DynamicKeys, all in memory, without a limit
    spill       the same with a spill: memory has all keys, and some rows
    spill_prefetch  the same, and layer.prefetch
    memmap      numpy.memmap, without reading pages ahead, and numpy
    rocksdb     a RocksDB of rows, by rocksdict

Ids are Zipf-distributed, with --order "rank" numbered by how frequent they are
(as vocabularies made by counting are), with "random" by no order; or uniform.

--growth measures "memory" and "prefetch" for 1, 2, 4 and 8 times the memory, by
Zipf (rank) and uniform ids, SGD and Adagrad, 16 and 128 wide. All tables have
the bytes of --rows and --dim with Adagrad. --chart draws it (matplotlib).
"""

import argparse
import itertools
import json
import mmap
import os
import pathlib
import re
import resource
import sys
import tempfile
import time

import numpy as np
from contenders import Contender

CONTENDERS = (
    *("memory", "files", "prefetch", "keys", "spill", "spill_prefetch"),
    *("memmap", "rocksdb"),
)
# The bytes that a key takes, with its place, wherever its row is.
KEY_BYTES = 64
RATE, INITIAL = 0.1, 0.1
EXPONENT = 1.05
#: Slots by the optimizer's name.
SLOTS = {"sgd": 0, "adagrad": 1}


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096, help="ids of a step")
    parser.add_argument("--optimizer", choices=SLOTS, default="adagrad")
    parser.add_argument("--times", type=float, default=4)
    parser.add_argument(
        "--order", choices=("rank", "random", "uniform"), default="rank"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="of a turn")
    parser.add_argument("--growth", action="store_true", help="see above")
    parser.add_argument("--chart", help="a file for --growth to draw, .svg")
    # A process's own.
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    others = {*args.contenders} - {"memory", "files", "prefetch"}
    if args.optimizer == "sgd" and others:
        parser.error(f"{sorted(others)} have Adagrad only.")
    return args


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


def limit(args, times):
    """The memory of a contender with a limit, beside the process's own."""
    return args.rows * row_bytes(args) / times


def row_bytes(args):
    """The bytes of a row and its slots."""
    return (1 + SLOTS[args.optimizer]) * args.dim * 4


def rows_in_memory(args):
    """How many rows of a table with a spill are in memory.

    All keys are, and a sixth of the memory is left to the file's pages.
    """
    memory = 5 / 6 * limit(args, args.times) - args.rows * KEY_BYTES
    if memory <= 0:
        sys.exit("A spill's keys need more memory than there is.")
    return int(memory / row_bytes(args))


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
        tf_keras.optimizers.SGD(RATE)
        if args.optimizer == "sgd"
        else tf_keras.optimizers.Adagrad(
            RATE, initial_accumulator_value=INITIAL
        ),
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
        # Little memory is left to the pages of a spill.
        batches_ahead = 8 if keys is None else 2
        dataset = layer.prefetch(dataset, batches=batches_ahead)
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

    ROOT = pathlib.Path("/sys/fs/cgroup")
    OLD = (ROOT / "memory").is_dir()

    def __init__(self):
        folder = self.folder(os.getpid())
        folder.mkdir(exist_ok=True)  # Of an earlier process of this number.
        name = "memory.limit_in_bytes" if self.OLD else "memory.max"
        self._limit = folder / name
        (folder / "cgroup.procs").write_text(str(os.getpid()))

    @classmethod
    def folder(cls, process):
        return cls.ROOT / ("memory" * cls.OLD) / f"tfrs-embed-{process}"

    @classmethod
    def remove(cls, process):
        """Removes the group of a process that has ended, if it had one."""
        if cls.folder(process).is_dir():
            cls.folder(process).rmdir()

    def limit(self, number):
        """Limits the memory beyond the process's own, in bytes."""
        text = pathlib.Path("/proc/self/status").read_text()
        [own] = re.findall(r"RssAnon:\s*(\d+) kB", text)
        self._limit.write_text(str(int(own) * 1024 + int(number)))


def answer(args):
    """Answers a number of seconds, and of times, with a turn's figures."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries' output must not get between the messages.
    group = Group() if args.contender not in ("memory", "keys") else None
    kinds = {"memmap": memmap_step, "rocksdb": rocksdb_step}
    step = kinds.get(args.contender, layer_step)(args)
    for _ in range(30):  # Until the process has the memory that it needs.
        step()
    print(json.dumps(None), file=channel, flush=True)
    for line in sys.stdin:
        duration, times = json.loads(line)
        if group is not None:
            more = limit(args, times)
            if args.contender.startswith("spill"):
                # These are the process's own already.
                more -= rows_in_memory(args) * row_bytes(args)
                more -= args.rows * KEY_BYTES
            group.limit(more)
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.time()
        steps = 0
        while time.time() - start < duration:
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


class Process(Contender):
    """A contender's process."""

    def __init__(self, contender, folder, options):
        super().__init__(
            *(*sys.argv[1:], *options),
            *("--contender", contender, "--folder", folder),
        )
        self.read()

    def turn(self, *request):
        return self.ask(json.dumps(request))

    def close(self):
        super().close()
        Group.remove(self.pid)


def measure(args, contenders, times, *options):
    """Measures contenders in turns.

    Args:
        args: the arguments.
        contenders: their names.
        times: how many times the memory the table takes, one after the other.
        *options: more arguments of the contenders' processes.

    Returns:
        By the times and the contender's name, the figures; of "memory" only for
        the first of the times.
    """
    found = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        processes = {n: Process(n, folder, options) for n in contenders}
        for each in times:
            turns = {n: [] for n in processes if n != "memory" or not found}
            for name in turns:  # Until the pages in use are there.
                processes[name].turn(args.seconds, each)
            for _ in range(args.rounds):
                for name in turns:
                    turns[name].append(processes[name].turn(args.seconds, each))
            for name, figures in turns.items():
                found[each, name] = {
                    key: np.median([turn[key] for turn in figures])
                    for key in figures[0]
                }
        for process in processes.values():
            process.close()
    return found


def growth(args):
    """Prints how the time of a step grows with the table's size."""
    times = (1, 2, 4, 8)
    lines = {}
    head = ["ids", "optimizer", "width", "memory", *(f"{n}x" for n in times)]
    print("|", " | ".join(head), "|")
    print("|---|---|" + "---:|" * (len(head) - 2))
    for order, optimizer, dim in itertools.product(
        ("rank", "uniform"), SLOTS, (16, 128)
    ):
        numbers = 2 * args.rows * args.dim
        rows = numbers // dim // (1 + SLOTS[optimizer])
        options = {
            "--order": order,
            "--optimizer": optimizer,
            "--dim": dim,
            "--rows": rows,
        }
        found = measure(
            args,
            ("memory", "prefetch"),
            times,
            *(str(each) for pair in options.items() for each in pair),
            *("--contenders", "prefetch"),
        )
        of_memory = found[1, "memory"]["ms"]
        of_times = [found[each, "prefetch"]["ms"] for each in times]
        kind = "Zipf" if order == "rank" else order
        line = lines[kind, optimizer, dim] = [of_memory, *of_times]
        ms = [f"{each:.2f}" for each in line]
        print(
            "|", " | ".join([kind, optimizer, str(dim), *ms]), "|", flush=True
        )
    if args.chart:
        draw(lines, head[3:], args.chart)


def draw(lines, labels, path):
    """Draws times in ms, by (ids, optimizer, width), for each label."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    kinds = dict.fromkeys(kind for kind, _, _ in lines)
    figure, panels = pyplot.subplots(
        1, len(kinds), figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    for kind, panel in zip(kinds, panels, strict=True):
        for (ids, optimizer, dim), times in lines.items():
            if ids == kind:
                panel.plot(times, "o-", label=f"{optimizer}, {dim} wide")
        panel.set_title(f"{kind} ids", fontsize=10)
        panel.set_xticks(range(len(labels)), labels)
        panel.set_xlabel("the table, in times of the memory", fontsize=8)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("ms a step", fontsize=8)
    panels[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main():
    args = parse()
    if args.contender:
        answer(args)
        return
    if args.growth:
        growth(args)
        return
    found = measure(args, args.contenders, [args.times])
    print("| contender | ms a step | kB read | kB written |")
    print("|---|---:|---:|---:|")
    for (_, name), figures in found.items():
        ms, read, written = (figures[k] for k in ("ms", "read", "written"))
        print(
            f"| {name} | {ms:.2f} | {read / 1e3:,.0f} | {written / 1e3:,.0f} |"
        )


if __name__ == "__main__":
    main()

"""Times training from files: a DLRM of Criteo's form.

    python benchmarks/input.py --torch /path/to/its/bin/python

The script writes --samples samples, of 13 floats, 26 strings of 8 bytes and
a label, to files in a folder, in each format that a contender reads, and trains
the same model on them. The strings are those of a power law over the
cardinalities of Criteo's columns; each column is hashed into a table of as many
rows, at most --rows. Contenders have a process each, and take turns:

    memory      our layer, of batches that were made before
    parquet     our layer, of `tfrs_embed.data.parquet_dataset`
    tfrecord    our layer, of TFRecord files and `tf.io.parse_example`
    csv         our layer, of text and `tf.io.decode_csv`
    stock       Keras's Hashing and Embedding, of the same TFRecord files
    stock-csv   Keras's Hashing and Embedding, of the same text
    torch       torch's EmbeddingBag and DataLoader, of the same Parquet files

torch has no hash of strings: its ids are the 8 bytes as an integer, modulo the
rows, which takes no time. A turn begins with steps that are not timed, for
batches that were made while others had their turns. "core µs" is the processor
time of a sample, reading and training together. "input" is how many samples
come from the files in a second without training.

With --deeprec, the model, the text and its order are those of DLRM in DeepRec's
modelzoo: batches of 512 from a buffer of 20,000 lines, tables of 10,000 rows,
batch normalization, no dot products, one layer of 256 behind the concatenation,
Adam (or --optimizer adagrad, whose updates touch the same rows in all).
--cores repeats everything on fewer cores. The contenders that run on
TensorFlow must have equal losses in two steps on the files' first samples.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import cases
import numpy as np
from contenders import Contender

FORMATS = {
    "memory": "parquet",
    "parquet": "parquet",
    "tfrecord": "tfrecord",
    "csv": "csv",
    "stock": "tfrecord",
    "stock-csv": "csv",
    "torch": "parquet",
}
CONTENDERS = ("memory", "parquet", "tfrecord", "stock", "torch")
DEEPREC = {
    "samples": 1_000_000,
    "rows": 10_000,
    "batch": 512,
    "bottom": [512, 256, 64],
    # The published program has a layer of 512, too, whose output nothing reads.
    "top": [256],
    "optimizer": "adam",
    "rounds": 5,
    "contenders": ("stock-csv", "csv", "parquet", "memory"),
}
# The published ranges of Criteo's numbers.
RANGES = (
    1_539, 22_069, 65_535, 561, 2_655_388, 233_523, 26_297, 5_106, 24_376, 9,
    181, 1_807, 6_879,
)  # fmt: skip
# Of lines or records, with --deeprec.
SHUFFLED, PARALLEL, AHEAD = 20_000, 28, 2
TOGETHER = 4_096  # Rows that are read from Parquet, with --deeprec.
FLOATS = [f"I{i}" for i in range(1, 14)]
WORDS = [f"C{i}" for i in range(1, 27)]
COLUMNS = ["label", *FLOATS, *WORDS]
BYTES = 8  # Of a word.
RATE, INITIAL, EPSILON = 0.01, 0.1, 1e-7  # Adagrad's.
ADAM_EPSILON = 1e-8  # The rate is the same.


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--samples", type=int, default=2_000_000)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--group", type=int, default=100_000, help="its rows")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--bottom", type=int, nargs="+", default=[512, 256, 64])
    parser.add_argument("--top", type=int, nargs="+", default=[512, 256])
    parser.add_argument(
        "--optimizer", choices=("adagrad", "adam"), default="adagrad"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4, help="of a turn")
    parser.add_argument("--folder", help="where files are, or are written to")
    parser.add_argument(
        "--contenders", nargs="+", choices=FORMATS, default=CONTENDERS
    )
    parser.add_argument(
        "--deeprec", action="store_true", help="the published configuration"
    )
    parser.add_argument(
        "--cores", type=int, nargs="+", help="numbers of cores; default: all"
    )
    parser.add_argument(
        "--torch",
        default=sys.executable,
        help="the interpreter that has torch and pyarrow",
    )
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    if parser.parse_known_args()[0].deeprec:
        parser.set_defaults(**DEEPREC)
    args = parser.parse_args()
    there = len(os.sched_getaffinity(0))
    args.cores = args.cores or [there]
    if not all(0 < n <= there for n in args.cores):
        parser.error(f"--cores: there are {there}, not {args.cores}")
    if args.deeprec and "torch" in args.contenders:
        parser.error("torch has no model for --deeprec")
    if args.optimizer == "adam" and "torch" in args.contenders:
        parser.error("torch has no --optimizer adam")
    return args


# The files.


def make_samples(rng, count, whole):
    """Labels, floats [count, 13], and the words' bytes [count, 26, 8].

    With `whole`, the floats are whole numbers of Criteo's ranges, most of them
    small.
    """
    labels = rng.integers(0, 2, count)
    if whole:
        floats = rng.random([count, len(FLOATS)]) * np.log1p(RANGES)
        floats = np.expm1(floats).astype(int).astype(np.float32)
    else:
        floats = rng.lognormal(size=[count, len(FLOATS)]).astype(np.float32)
    words = np.empty([count, len(WORDS), BYTES], np.uint8)
    power = 1 - cases.ALPHA
    for i, cardinality in enumerate(cases.CRITEO):
        # The integral of x^-ALPHA, inverted.
        drawn = 1 + rng.random(count) * ((cardinality + 1.0) ** power - 1)
        ids = np.minimum(drawn ** (1 / power) - 1, cardinality - 1)
        mixed = (ids.astype(np.uint64) + 1) * (2_654_435_761 + 2 * i) % 2**32
        digits = mixed[:, None] >> np.arange(0, 32, 4, dtype=np.uint64) & 15
        words[:, i] = np.frombuffer(b"0123456789abcdef", np.uint8)[digits]
    return labels, floats, words


def write(args, folder, formats):
    """Writes the same samples in these formats."""
    rng = np.random.default_rng(0)
    count = args.samples // args.files
    for number in range(args.files):
        samples = make_samples(rng, count, args.deeprec)
        path = f"{folder}/part-{number:03d}"
        if formats & {"parquet", "csv"}:
            write_table(args, path, formats, *samples)
        if "tfrecord" in formats:
            write_records(f"{path}.tfrecord", *samples)


def write_table(args, path, formats, labels, floats, words):
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    count = len(labels)
    arrays = {"label": pa.array(labels)}
    arrays |= {n: pa.array(floats[:, i]) for i, n in enumerate(FLOATS)}
    offsets = np.arange(count + 1, dtype=np.int32) * BYTES
    for i, name in enumerate(WORDS):
        data = np.ascontiguousarray(words[:, i])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        arrays[name] = pa.Array.from_buffers(pa.string(), count, buffers)
    table = pa.table(arrays)
    if "parquet" in formats:
        pq.write_table(table, f"{path}.parquet", row_group_size=args.group)
    if "csv" in formats:
        options = pyarrow.csv.WriteOptions(
            include_header=False, quoting_style="none"
        )
        pyarrow.csv.write_csv(table, f"{path}.csv", options)


def write_records(path, labels, floats, words):
    import tensorflow as tf

    # All records have the same length, and fields at the same places.
    marks = {n: bytes([128 + i]) * BYTES for i, n in enumerate(WORDS)}
    numbers = {n: np.float32(1e9 + i * 1e6) for i, n in enumerate(FLOATS)}
    features = {n: bytes_feature(tf, m) for n, m in marks.items()}
    for name, value in numbers.items():
        features[name] = tf.train.Feature(
            float_list=tf.train.FloatList(value=[value])
        )
    features["label"] = tf.train.Feature(
        int64_list=tf.train.Int64List(value=[99])
    )
    example = tf.train.Example(features=tf.train.Features(feature=features))
    record = example.SerializeToString()
    records = np.tile(np.frombuffer(record, np.uint8), (len(labels), 1))
    records[:, record.index(99, record.index(b"label"))] = labels
    for i, name in enumerate(FLOATS):
        at = record.index(numbers[name].tobytes())
        records[:, at : at + 4] = floats[:, i : i + 1].view(np.uint8)
    for i, name in enumerate(WORDS):
        at = record.index(marks[name])
        records[:, at : at + BYTES] = words[:, i]
    with tf.io.TFRecordWriter(path) as writer:
        for row in records:
            writer.write(row.tobytes())


def bytes_feature(tf, value):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


# The contenders.


def table_rows(args):
    if args.deeprec:
        return [args.rows] * len(WORDS)
    return [min(n, args.rows) for n in cases.CRITEO]


def load_tensorflow(args):
    """A step of TensorFlow's, its input, and losses on the first samples."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf
    import tf_keras

    # The legacy optimizers run TensorFlow's fused updates: Keras's own layers
    # take a fifth less processor time with this Adam than with the new one.
    if args.optimizer == "adam":
        optimizer = tf_keras.optimizers.legacy.Adam(RATE, epsilon=ADAM_EPSILON)
    else:
        optimizer = tf_keras.optimizers.legacy.Adagrad(
            RATE, initial_accumulator_value=INITIAL, epsilon=EPSILON
        )
    embed, tables = make_embedding(args, optimizer)
    predict, layers = make_model(args, embed)

    def train(batch):
        with tf.GradientTape() as tape:
            logits = predict(batch)
            labels = tf.cast(batch["label"], tf.float32)
            loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
            )
        models = [*layers, *tables]
        variables = [v for model in models for v in model.trainable_variables]
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    ordered, dataset = iter(read(args, shuffle=False)), read(args, args.deeprec)
    if args.contender == "memory":
        step = tf.function(train)
        known = [float(step(next(ordered))) for _ in range(2)]
        batches = list(dataset.take(32))
        return lambda i: float(step(batches[i % 32])), None, known
    iterator = iter(dataset)
    from_iterator = tf.function(lambda each: train(next(each)))
    known = [float(from_iterator(ordered)) for _ in range(2)]
    return lambda _: float(from_iterator(iterator)), iter(dataset), known


def make_embedding(args, optimizer):
    """A function of words that returns their vectors, and what it trains."""
    import tf_keras
    from peers.tf_steps import RowValues

    import tfrs_embed

    sizes = dict(zip(WORDS, table_rows(args), strict=True))
    if args.contender.startswith("stock"):
        hashes = {n: tf_keras.layers.Hashing(s) for n, s in sizes.items()}
        tables = {
            n: tf_keras.layers.Embedding(
                s, args.dim, embeddings_initializer=RowValues()
            )
            for n, s in sizes.items()
        }
        return (
            lambda words: [tables[n](hashes[n](words[n])) for n in WORDS]
        ), list(tables.values())
    layer = tfrs_embed.PartialTPUEmbedding(
        {
            n: tfrs_embed.FeatureConfig(
                n,
                tfrs_embed.TableConfig(n, s, args.dim, RowValues()),
                hashing=tfrs_embed.Hash(),
            )
            for n, s in sizes.items()
        },
        optimizer,
        size_threshold=0,
    )
    return (lambda words: list(layer(words, training=True).values())), [layer]


def make_model(args, embed):
    """A function of a batch that returns logits, and its dense layers."""
    import tensorflow as tf
    import tf_keras

    # All contenders begin with the same weights.
    seeds = itertools.count()

    def mlp(units, normalize=False):
        layers = []
        for n in units:
            start = tf_keras.initializers.GlorotUniform(next(seeds))
            layers.append(
                tf_keras.layers.Dense(n, "relu", kernel_initializer=start)
            )
            if normalize:
                layers.append(tf_keras.layers.BatchNormalization())
        return tf_keras.Sequential(layers)

    bottom = mlp([*args.bottom, args.dim], normalize=args.deeprec)
    top = mlp(args.top)
    click = tf_keras.layers.Dense(
        1, kernel_initializer=tf_keras.initializers.GlorotUniform(next(seeds))
    )
    count = len(WORDS) + 1
    row, column = np.tril_indices(count, -1)
    pairs = row * count + column

    def interact(dense, vectors):
        if args.deeprec:
            return tf.concat([dense, *vectors], 1)
        vectors = tf.stack([dense, *vectors], 1)
        products = tf.matmul(vectors, vectors, transpose_b=True)
        products = tf.reshape(products, [-1, count**2])
        products = tf.gather(products, pairs, axis=1)
        return tf.concat([dense, products], 1)

    def predict(batch):
        dense = tf.stack([batch[n] for n in FLOATS], 1)
        dense = dense / RANGES if args.deeprec else tf.math.log1p(dense)
        dense = bottom(dense, training=True)
        vectors = embed({n: batch[n] for n in WORDS})
        return click(top(interact(dense, vectors)))[:, 0]

    return predict, [bottom, top, click]


def read(args, shuffle):
    """The batches of a contender's files, again and again."""
    import tensorflow as tf

    import tfrs_embed

    files = FORMATS[args.contender]
    if files == "parquet":
        dataset = tfrs_embed.data.parquet_dataset(
            f"{args.folder}/*.parquet",
            COLUMNS,
            TOGETHER if args.deeprec else args.batch,
            shuffle_seed=1 if shuffle else None,
            drop_remainder=True,
        )
        dataset = dataset.repeat()
        if args.deeprec:
            dataset = dataset.rebatch(args.batch, drop_remainder=True)
        return dataset.prefetch(tf.data.AUTOTUNE)
    paths = sorted(map(str, pathlib.Path(args.folder).glob(f"*.{files}")))
    kind, parse_batch = tf.data.TFRecordDataset, parse_records
    if files == "csv":
        kind, parse_batch = tf.data.TextLineDataset, parse_lines
    parallel = ahead = tf.data.AUTOTUNE
    if args.deeprec:
        parallel, ahead = PARALLEL, AHEAD
    dataset = kind(paths)
    if shuffle:
        dataset = dataset.shuffle(SHUFFLED, seed=1).repeat()
    dataset = dataset.batch(args.batch, drop_remainder=True)
    dataset = dataset.map(parse_batch, num_parallel_calls=parallel)
    if not shuffle:
        dataset = dataset.repeat()
    return dataset.prefetch(ahead)


def parse_lines(lines):
    import tensorflow as tf

    defaults = [[0], *[[0.0]] * len(FLOATS), *[[" "]] * len(WORDS)]
    columns = tf.io.decode_csv(lines, defaults)
    return dict(zip(COLUMNS, columns, strict=True))


def parse_records(records):
    import tensorflow as tf

    spec = {n: tf.io.FixedLenFeature([], tf.string) for n in WORDS}
    spec |= {n: tf.io.FixedLenFeature([], tf.float32) for n in FLOATS}
    spec["label"] = tf.io.FixedLenFeature([], tf.int64)
    return tf.io.parse_example(records, spec)


def load_torch(args):
    """A step of torch's, its input, and no losses to compare."""
    import pyarrow.parquet as pq
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sizes = table_rows(args)

    class Samples(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                for path in sorted(pathlib.Path(args.folder).glob("*.parquet")):
                    file = pq.ParquetFile(path)
                    for batch in file.iter_batches(args.batch, columns=COLUMNS):
                        if len(batch) == args.batch:
                            yield self.tensors(batch)

        def tensors(self, batch):
            dense = np.stack([batch[n].to_numpy() for n in FLOATS], 1)
            ids = []
            for name, size in zip(WORDS, sizes, strict=True):
                words = batch[name]
                data = np.frombuffer(words.buffers()[2], np.uint64)
                data = data[words.offset : words.offset + len(words)]
                ids.append((data % size).astype(np.int64))
            labels = batch["label"].to_numpy().astype(np.float32)
            return [*map(torch.from_numpy, (dense, np.stack(ids), labels))]

    def mlp(width, units):
        layers = []
        for n in units:
            layers += [torch.nn.Linear(width, n), torch.nn.ReLU()]
            width = n
        return torch.nn.Sequential(*layers)

    count = len(WORDS) + 1
    bottom = mlp(len(FLOATS), [*args.bottom, args.dim])
    top = mlp(args.dim + count * (count - 1) // 2, args.top)
    click = torch.nn.Linear(args.top[-1], 1)
    tables = [
        torch.nn.EmbeddingBag(n, args.dim, mode="sum", sparse=True)
        for n in sizes
    ]
    for table in tables:
        torch.nn.init.uniform_(table.weight, -0.05, 0.05)
    models = [bottom, top, click, *tables]
    optimizer = torch.optim.Adagrad(
        [p for model in models for p in model.parameters()],
        RATE,
        initial_accumulator_value=INITIAL,
        eps=EPSILON,
    )
    row, column = np.tril_indices(count, -1)
    pairs = torch.from_numpy(row * count + column)
    loss_of = torch.nn.BCEWithLogitsLoss()

    def step(_):
        dense, ids, labels = next(batches)
        optimizer.zero_grad()
        dense = bottom(torch.log1p(dense))
        vectors = [
            table(each[:, None])
            for table, each in zip(tables, ids, strict=True)
        ]
        vectors = torch.stack([dense, *vectors], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        logits = click(top(torch.cat([dense, products[:, pairs]], 1)))[:, 0]
        loss = loss_of(logits, labels)
        loss.backward()
        optimizer.step()
        return float(loss)

    def load():
        # A process of its own reads, as a dataset's does whose Python works.
        loader = torch.utils.data.DataLoader(
            Samples(), batch_size=None, num_workers=1, prefetch_factor=4
        )
        return iter(loader)

    batches = load()
    return step, load(), None


def processor_seconds():
    """Of this process and those that read for it."""
    ticks, own = 0, pathlib.Path("/proc/self/task")
    for children in own.glob("*/children"):
        for child in children.read_text().split():
            fields = pathlib.Path(f"/proc/{child}/stat").read_text()
            ticks += sum(map(int, fields.rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def answer(args):
    """Answers seconds with samples a second, or the input's without steps."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries' output must not get between the messages.
    # Before libraries count the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores[0]])
    load = load_torch if args.contender == "torch" else load_tensorflow
    step, batches, known = load(args)
    losses = [step(i) for i in range(20)]
    print(json.dumps([losses, known]), file=channel, flush=True)

    def run(work, seconds):
        start, before, count = time.perf_counter(), processor_seconds(), 0
        while time.perf_counter() - start < seconds:
            work(count)
            count += 1
        samples = count * args.batch
        took = processor_seconds() - before
        return samples / (time.perf_counter() - start), 1e6 * took / samples

    for line in sys.stdin:
        seconds, trains = json.loads(line)
        work = step if trains else lambda _: next(batches)
        found = None
        if trains or batches is not None:
            run(work, seconds / 3)
            found = run(work, seconds)
        print(json.dumps(found), file=channel, flush=True)


class Process(Contender):
    """A contender's process."""

    def __init__(self, contender, args, folder, cores):
        super().__init__(
            *sys.argv[1:],
            *("--contender", contender, "--folder", folder),
            *("--cores", str(cores)),
            python=args.torch if contender == "torch" else None,
            # torch's threads must not spin where reading needs a core.
            OMP_WAIT_POLICY="passive",
        )
        self.found = []
        self.losses, self.known = self.begin(self.read) or (None, None)

    def turn(self, seconds, trains):
        return self.ask(json.dumps([seconds, trains]))


def measure(args, folder, cores):
    processes = {n: Process(n, args, folder, cores) for n in args.contenders}
    there = [n for n in processes if not processes[n].missing]
    require_same_model({n: processes[n].known for n in there})
    for number in range(args.rounds):
        # Not always in one order: who comes after whom counts.
        for name in np.roll(there, number):
            process = processes[name]
            process.found.append(process.turn(args.seconds, True))
    best = statistics.median(rate for rate, _ in processes[there[0]].found)
    print(
        f"{'contender':<10} {'cores':>5} {'samples/s':>10} {'per core':>9} "
        f"of {there[0]:<9} {'core µs':>8} {'input':>9}"
    )
    for name, process in processes.items():
        if process.missing:
            print(f"{name:<10} missing: {process.missing}")
            continue
        rate, spent = map(statistics.median, zip(*process.found, strict=True))
        alone = process.turn(args.seconds, False)
        print(
            f"{name:<10} {cores:5} {rate:10,.0f} {rate / cores:9,.0f} "
            f"{rate / best:12.3f} {spent:8.1f} "
            f"{'' if alone is None else f'{alone[0]:,.0f}':>9}",
            flush=True,
        )
        # They learn the labels' mean, if nothing else.
        assert np.mean(process.losses[-5:]) < 1, process.losses
    for process in processes.values():
        process.close()


def require_same_model(losses):
    """Requires equal losses on the same samples.

    The second loss is that after an update. Keras's Adam moves rows which a
    step doesn't look up, but not before the second step.
    """
    known = {n: values for n, values in losses.items() if values}
    for name, values in known.items():
        first = next(iter(known.values()))
        if not np.allclose(values, first, rtol=1e-3):
            raise RuntimeError(f"{name} has the losses {values}, not {first}")


def main():
    args = parse()
    if args.contender:
        answer(args)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or temporary
        os.makedirs(folder, exist_ok=True)
        formats = {FORMATS[n] for n in args.contenders}
        if any(not any(pathlib.Path(folder).glob(f"*.{f}")) for f in formats):
            write(args, folder, formats)
        for cores in args.cores:
            measure(args, folder, cores)


if __name__ == "__main__":
    main()

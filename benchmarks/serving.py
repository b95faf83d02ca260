"""Times lookups of exported models, beside plain gathers and fbgemm.

    python benchmarks/serving.py --fbgemm /path/to/its/bin/python

A request has a batch of ids for each of --tables tables, --rows rows of --dim
in all, and gets their vectors in one matrix. Each contender has a process of
its own, and all are asked in turns: the export by TensorFlow's operations
(stock) and by kernels, a SavedModel of tf.gather alone, and fbgemm's tables for
inference on CPUs. These may be installed elsewhere: benchmarks/requirements.txt
has their versions. Models run in a session, as in TensorFlow Serving and its
C++ loader; "kernels, one thread" is a session whose requests don't use
TensorFlow's pool of threads. Ids are arrays before the clock starts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
from contenders import Contender

KINDS = ("float32", "int8", "int4")
ONE_THREAD = "kernels, one thread"
WARM_UP = 20


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=1_000_000, help="in all")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 4096])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--each", type=int, default=50, help="calls in a round")
    parser.add_argument(
        "--fbgemm",
        default=sys.executable,
        metavar="PYTHON",
        help="the interpreter that has torch and fbgemm_gpu",
    )
    # A process's own.
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_models(args):
    """Writes a model for each kind of rows, and "plain", of gathers alone."""
    import tensorflow as tf
    import tf_keras

    import tfrs_embed

    rows = args.rows // args.tables
    names = [f"table_{i}" for i in range(args.tables)]
    layer = tfrs_embed.PartialTPUEmbedding(
        {
            name: tfrs_embed.FeatureConfig(
                name, tfrs_embed.TableConfig(name, rows, args.dim)
            )
            for name in names
        },
        tf_keras.optimizers.Adagrad(0.01),
        size_threshold=0,
    )
    layer.build()
    ids = tf.TensorSpec([args.tables, None], tf.int32, "ids")

    def serve(ids):
        vectors = layer(dict(zip(names, tf.unstack(ids), strict=True)))
        return {"vectors": tf.concat(list(vectors.values()), 1)}

    for kind in args.kinds:
        tfrs_embed.serving.export(
            layer,
            f"{args.folder}/{kind}",
            signatures={"serving_default": (serve, [ids])},
            rows=kind,
        )
    plain = tf.Module()
    plain.tables = [
        tf.Variable(layer.embedding_tables[name][:]) for name in names
    ]

    @tf.function(input_signature=[ids])
    def gather(ids):
        vectors = [
            tf.gather(table, i)
            for table, i in zip(plain.tables, tf.unstack(ids), strict=True)
        ]
        return {"vectors": tf.concat(vectors, 1)}

    tf.saved_model.save(plain, f"{args.folder}/plain", signatures=gather)
    print(tfrs_embed.kernels.status().path or "")


def load_tensorflow(args, library=""):
    """Returns what makes a request's tensor, and what answers it."""
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2

    if library:
        tf.load_op_library(library)
    name = "plain" if args.contender == "gather" else args.kind
    config = tf.compat.v1.ConfigProto()
    if args.contender == ONE_THREAD:
        config.experimental.executor_type = "SINGLE_THREADED_EXECUTOR"
    session = tf.compat.v1.Session(graph=tf.Graph(), config=config)
    with session.graph.as_default():
        model = tf.compat.v1.saved_model.load(
            session, ["serve"], f"{args.folder}/{name}"
        )
    signature = model.signature_def["serving_default"]
    call = session._make_callable_from_options(
        config_pb2.CallableOptions(
            feed=[signature.inputs["ids"].name],
            fetch=[signature.outputs["vectors"].name],
        )
    )
    return np.asarray, lambda ids: call(ids)[0]


def load_fbgemm(args):
    import torch
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        EmbeddingLocation,
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    kinds = {
        "float32": SparseType.FP32,
        "int8": SparseType.INT8,
        "int4": SparseType.INT4,
    }
    rows = args.rows // args.tables
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(
        [
            ("", rows, args.dim, kinds[args.kind], EmbeddingLocation.HOST)
            for _ in range(args.tables)
        ],
        device="cpu",
        output_dtype=SparseType.FP32,
    )
    tables.fill_random_weights()

    def request(ids):
        offsets = torch.arange(ids.size + 1, dtype=torch.int32)
        return torch.from_numpy(ids.ravel()), offsets

    return request, lambda request: tables(*request).numpy()


def answer(args):
    """Answers a batch's size and a number of calls with their seconds."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries' output must not get between the messages.
    library = sys.stdin.readline().strip()
    if args.contender == "fbgemm":
        request, run = load_fbgemm(args)
    else:
        kernels = args.contender in ("kernels", ONE_THREAD)
        request, run = load_tensorflow(args, library if kernels else "")
    random = np.random.default_rng(0)
    requests = {}
    for line in sys.stdin:
        batch, calls = json.loads(line)
        if batch not in requests:
            size = (args.tables, batch)
            requests[batch] = [
                request(
                    random.integers(0, args.rows // args.tables, size, np.int32)
                )
                for _ in range(16)
            ]
        seconds = []
        for i in range(calls):
            ids = requests[batch][i % 16]
            start = time.perf_counter()
            found = run(ids)
            seconds.append(time.perf_counter() - start)
        assert found.shape == (batch, args.tables * args.dim)
        print(json.dumps(seconds), file=channel, flush=True)


class Process(Contender):
    """A contender's process."""

    def __init__(self, contender, kind, folder, library, args):
        options = ["--contender", contender, "--kind", kind, "--folder", folder]
        for name in ("tables", "rows", "dim"):
            options += [f"--{name}", str(getattr(args, name))]
        python = args.fbgemm if contender == "fbgemm" else None
        super().__init__(*options, python=python)
        self.send(library)
        self.begin(self.times, 1, 1)

    def times(self, batch, calls):
        return self.ask(json.dumps([batch, calls]))


def compare(kind, folder, library, args):
    """Prints a table's lines: contenders, and the batches' times."""
    names = ["stock", "kernels", ONE_THREAD, "gather", "fbgemm"]
    if kind != "float32":
        names.remove("gather")
    processes = {n: Process(n, kind, folder, library, args) for n in names}
    present = {n: p for n, p in processes.items() if not p.missing}
    cells = {name: [] for name in present}
    for batch in args.batches:
        seconds = {name: [] for name in present}
        for process in present.values():
            process.times(batch, WARM_UP)
        for _ in range(args.rounds):
            for name, process in present.items():
                seconds[name] += process.times(batch, args.each)
        for name, each in seconds.items():
            ms = np.quantile(each, [0.5, 0.99]) * 1e3
            cells[name] += [f"{value:.3f}" for value in ms]
    for name, process in processes.items():
        process.close()
        columns = cells.get(name) or [f"missing: {process.missing}"]
        print(f"| {kind} | {name} | {' | '.join(columns)} |", flush=True)


def main():
    args = parse()
    if args.contender == "models":
        make_models(args)
        return
    if args.contender:
        answer(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        made = subprocess.run(
            [*command, "--contender", "models"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
        )
        library = made.stdout.splitlines()[-1]
        head = "".join(f" {b:,}: p50 | p99 |" for b in args.batches)
        print(
            f"| rows | ms |{head}\n|---|---|{'---:|' * 2 * len(args.batches)}"
        )
        for kind in args.kinds:
            compare(kind, folder, library, args)


if __name__ == "__main__":
    main()

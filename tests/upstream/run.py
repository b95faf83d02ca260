"""Runs other projects' own tests on this package's layers.

    [SOURCE=FOLDER] python tests/upstream/run.py [--every N] [PROJECT]

The tests run unchanged; `swap.py` puts layers of this package in the place of
the projects' own. Those of TensorFlow Recommenders, Keras 3 and TF-models are
inside the installed wheels. Other wheels lack their tests: SOURCE in the
environment names a folder that has the projects' repositories, in folders
`keras_rs`, `tf_keras` and `tensorflow`, each at the release that is installed.
Without one, its project is an error, and a run of all projects says that it
goes without.

What is left out, and why, is in `SUITES` and `LEFT_OUT`.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "requirements.txt"
BUILD = ROOT / ".build" / "upstream"
SITE = BUILD / "site"

#: The projects whose tests are in repositories only, and a file of each.
IN_SOURCE = {
    "keras_rs": "keras_rs/src/layers/embedding/distributed_embedding_test.py",
    "tf_keras": "tf_keras/layers/core/embedding_test.py",
    "tensorflow": "tensorflow/python/tpu/tpu_embedding_v3_test.py",
}

#: The swaps in tests of Keras 3; others are of tf_keras, or of neither.
OF_KERAS_3 = ("keras", "keras_rs", "keras_rs_of_tf_keras", "embed_reduce")

# Two files take nearly all of the time.
SIDE_BY_SIDE = 2

# Of a failure's output: the last traceback and the list of failed tests.
FAILURE_LINES = 100


@dataclasses.dataclass
class Suite:
    """Tests that run in one process.

    Attributes:
        project: whose tests they are.
        swap: the function of `swap.py`, less "in_".
        modules: the tests' modules.
        options: further options of pytest, and of `swap.py`.
        left_out: the names of tests that aren't run, with "*" for any part of
            a name, and why.
    """

    project: str
    swap: str
    modules: tuple[str, ...]
    options: tuple[str, ...] = ()
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self):
        return f"{self.swap}-{self.modules[0].rpartition('.')[-1]}"


NOT_OF_KERAS_RS = {
    "test_basics_*_auto": "counts keras_rs's sublayers and trainable "
    "variables, one to a table",
    "test_basics_*_default_device": "counts them too",
    "test_mixed_placement": "needs a TPU",
    "test_update_stats_init": "demands that update_stats be an error with "
    "TensorFlow",
}

# The slowest first.
SUITES = [
    Suite(
        "tfrs",
        "tfrs",
        (
            "tensorflow_recommenders.experimental.models.ranking_test",
            "tensorflow_recommenders.experimental.layers.embedding"
            ".partial_tpu_embedding_test",
            "tensorflow_recommenders.layers.embedding.tpu_embedding_layer_test",
            "tensorflow_recommenders.layers.feature_multiplexing"
            ".unified_embedding_test",
        ),
        left_out={
            f"test_embedding_layer{i}": "declares rows of sparse ids by an "
            "Input of the shape ()"
            for i in range(0, 12, 2)
        },
    ),
    Suite(
        "tfmodels",
        "tfrs",
        ("official.recommendation.ranking.train_test",),
        (
            *("-p", "train_flags"),
            # Its other tests connect to a TPU.
            *("-k", "OneDevice or Mirrored"),
            # DLRM-DCNv2 is configured to use TPUEmbedding instead.
            *("--without-layer", "DlrmDcnV2"),
        ),
    ),
    Suite(
        "tfmodels",
        "tfrs",
        ("official.recommendation.ranking.task_test",),
        ("--without-layer", "test_task[89]$"),  # DLRM-DCNv2 once more.
    ),
    Suite(
        "keras",
        "keras",
        (
            "keras.src.layers.core.embedding_test",
            "keras.src.layers.attention.multi_head_attention_test",
            "keras.src.layers.attention.grouped_query_attention_test",
            "keras.src.layers.rnn.time_distributed_test",
            "keras.src.layers.layer_test",
        ),
        ("--mentioning", "Embedding("),
        {
            "*quantize*": "quantizes, which Embedding doesn't",
            "test_int4_*": "quantizes, too",
            "test_embedding_int8_*": "quantizes, too",
            "*lora*": "adapts by LoRA, which Embedding doesn't",
            "test_*sparse": "gives sparse ids no combiner, but row 0 where "
            "there is no id",
            "test_invalid_*put_dim": "compares the words of an error",
            "test_legacy_load_own_variables": "reads a private attribute",
            "test_with_mask_zero": "looks up fractions",
        },
    ),
    Suite(
        "tf_keras",
        "tf_keras",
        (
            "tf_keras.layers.core.embedding_test",
            "tf_keras.layers.attention.multi_head_attention_test",
            "tf_keras.layers.rnn.time_distributed_test",
            "tf_keras.layers.rnn.lstm_test",
            "tf_keras.layers.rnn.gru_test",
            "tf_keras.layers.rnn.simple_rnn_test",
            "tf_keras.engine.sequential_test",
        ),
        ("--mentioning", "Embedding("),
        {
            "*_sparse_*": "gives sparse ids no combiner, but row 0 where "
            "there is no id",
            "*_sprase_*": "needs sparse=True, which Embedding doesn't have",
            "test_use_one_hot_*": "needs a private argument",
        },
    ),
    Suite(
        "keras_rs",
        "keras_rs",
        ("keras_rs.src.layers.embedding.distributed_embedding_test",),
        left_out=NOT_OF_KERAS_RS,
    ),
    Suite(
        "keras_rs",
        "keras_rs_of_tf_keras",
        ("keras_rs.src.layers.embedding.distributed_embedding_test",),
        left_out={
            **NOT_OF_KERAS_RS,
            "test_shared_table": "counts them too, by a method of Keras 3",
        },
    ),
    Suite(
        "keras_rs",
        "embed_reduce",
        ("keras_rs.src.layers.embedding.embed_reduce_test",),
        left_out={
            "test_*_dense_1d*": "combines each id by itself: Embedding asks "
            "for a dimension to combine over"
        },
    ),
    Suite(
        "tensorflow",
        "tensorflow",
        (
            "tensorflow.python.tpu.tpu_embedding_v3_test",
            "tensorflow.python.tpu.tpu_embedding_v3_checkpoint_test",
        ),
        left_out={
            "test_pipelining_and_summary_recording*": "multiplies float32 "
            "activations by an int32 variable",
            "test_raise_error_when_weight_decay_is_set": "demands a "
            "NotImplementedError: here it is a ValueError that names the table",
        },
    ),
]

#: The projects' other tests of embeddings, and why they are no suite.
LEFT_OUT = {
    "tensorflow": {
        "tensorflow/python/tpu/tests/tpu_embedding_v1_*, v2_*": "are of "
        "TPUEmbedding, whose operations run on TPUs of generations 2 to 4 only",
        "tensorflow/python/tpu/tpu_embedding_v3_additional_test": "makes its "
        "strategy of the topology of a TPU",
        "its other tpu_embedding_v3_* tests": "are of preprocessing and "
        "layouts, and make no TPUEmbeddingV2",
        "tensorflow/python/tpu/tpu_embedding_for_serving_test": "is of "
        "TPUEmbeddingForServing, which no layer here replaces",
    },
    "keras_rs": {
        "keras_rs/src/layers/embedding/jax": "needs JAX",
        "keras_rs/src/layers/embedding/tensorflow": "is of its own conversion "
        "to TensorFlow's configurations",
    },
    "tfrs": {
        "those of interactions, tasks, metrics and optimizers": "have no "
        "embedding layer",
    },
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    projects = sorted({suite.project for suite in SUITES})
    parser.add_argument("project", nargs="?", choices=projects)
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="run each Nth test of a suite only [all]",
    )
    flags = parser.parse_args()
    suites, without = [], []
    for suite in SUITES:
        if flags.project in (None, suite.project):
            missing = missing_source(suite.project)
            if missing and flags.project:
                sys.exit(missing)
            (without if missing else suites).append(suite)
    if any(suite.project == "tfmodels" for suite in suites):
        install()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(SIDE_BY_SIDE) as pool,
    ):
        passed = list(
            pool.map(lambda suite: run(suite, flags.every, scratch), suites)
        )
    for project in dict.fromkeys(suite.project for suite in suites):
        for tests, reason in LEFT_OUT.get(project, {}).items():
            print(f"==== {project}: without {tests}, which {reason}")
    for project in dict.fromkeys(suite.project for suite in without):
        print(f"==== LEFT OUT: {missing_source(project)}")
    sys.exit(not all(passed))


def source(project):
    """The folder of a project's repository, or None: the wheel has tests."""
    if project not in IN_SOURCE:
        return None
    return Path(os.environ.get("SOURCE") or "SOURCE").resolve() / project


def missing_source(project):
    """What to say where a project's repository isn't given; else None."""
    folder = source(project)
    if folder is None or (folder / IN_SOURCE[project]).exists():
        return None
    version = importlib.metadata.version(project.replace("_", "-"))
    return (
        f"{project}'s tests, as its wheel has none: SOURCE must name a folder "
        f"with {project}/{IN_SOURCE[project]}, of release {version}."
    )


def install():
    """Puts the requirements in SITE, unless they are there.

    A folder beside the environment keeps them out of it, whose packages pip
    would find in conflict with TF-models' own requirements. A second virtual
    environment would need a second TensorFlow.
    """
    tensorflow = importlib.metadata.version("tensorflow")
    minor = ".".join(tensorflow.split(".")[:2])
    tensorboard = f"tensorboard=={minor}.*"
    wanted = "\n".join(
        [sys.implementation.cache_tag, tensorboard, REQUIREMENTS.read_text()]
    )
    stamp = SITE / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if SITE.exists():
        shutil.rmtree(SITE)
    print(f"Installing {REQUIREMENTS.relative_to(ROOT)} in {SITE}", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
    pip += ["install", "--no-deps", "--target", SITE]
    subprocess.run([*pip, "-r", REQUIREMENTS, tensorboard], check=True)
    stamp.write_text(wanted)


def run(suite, every, scratch):
    """Runs a suite's tests and prints what came of it.

    Args:
        suite: the Suite.
        every: how many of its tests there are to each that is run.
        scratch: an empty folder for whatever the tests write.

    Returns:
        Whether tests have run and all of them have passed.
    """
    path = [HERE, ROOT]
    if suite.project == "tfmodels":
        path.append(SITE)
    folder = source(suite.project)
    if suite.project == "keras_rs":
        path.append(folder)
    path.extend(filter(None, [os.environ.get("PYTHONPATH")]))
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TEST_TMPDIR": scratch,
        "TF_USE_LEGACY_KERAS": str(int(suite.swap not in OF_KERAS_3)),
        "TMPDIR": scratch,
    }
    command = [sys.executable, "-m", "pytest", "--pyargs", *suite.modules]
    command += ["-p", "swap", "--swap", suite.swap, *suite.options]
    if folder is not None:
        command += ["--source", folder]
    for test in suite.left_out:
        command += ["--leave-out", test]
    command += ["--every", str(every)]
    command += ["-q", "-rfE", "--tb=short", "--show-capture=no"]
    # Not this project's own settings, nor its cache.
    command += ["-c", os.devnull, "--rootdir", scratch]
    command += ["-p", "no:cacheprovider"]
    BUILD.mkdir(parents=True, exist_ok=True)
    name = suite.name
    log = BUILD / f"{name}.log"
    print(f"==== {name}: started", flush=True)
    begin = time.monotonic()
    with log.open("w") as output:
        status = subprocess.call(
            command,
            cwd=scratch,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    passed = status == 0
    lines = log.read_text(errors="replace").splitlines()
    # Of a success only the swap's line and pytest's verdict.
    shown = lines[-2 if passed else -FAILURE_LINES :]
    for test, reason in suite.left_out.items():
        print(f"==== {name}: without {test}, which {reason}", flush=True)
    print(
        f"==== {name}: {'passed' if passed else 'FAILED'} in "
        f"{time.monotonic() - begin:.0f} s, see {log}",
        *shown,
        sep="\n",
        flush=True,
    )
    return passed


if __name__ == "__main__":
    main()

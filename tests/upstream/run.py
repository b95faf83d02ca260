"""Runs other projects' own tests on this package's layers.

    python tests/upstream/run.py [--every N] [tfrs|tfmodels|keras_rs]

Those of TensorFlow Recommenders, where PartialTPUEmbedding takes the place of
the layer of the same name, and of TF-models, whose ranking model gets it from
there, are inside the installed wheels. Those of keras_rs, where
DistributedEmbedding does, of Keras 3, are in its repository only; KERAS_RS in
the environment may name a clone of it. Where there is neither, `keras_rs` is an
error, and a run of all projects says that it goes without.
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

KERAS_RS = BUILD / "keras_rs"
KERAS_RS_URL = "https://github.com/keras-team/keras-rs"
KERAS_RS_TAG = "v0.4.0"
KERAS_RS_COMMIT = "ef983222f394463fc31db1066851725232d1181d"
NO_KERAS_RS = (
    f"keras_rs's tests, as there is no {KERAS_RS_TAG} of {KERAS_RS_URL} to be "
    "had, and KERAS_RS names no clone of it:"
)

# Two files take nearly all of the time.
SIDE_BY_SIDE = 2

# Of a failure's output: the last traceback and the list of failed tests.
FAILURE_LINES = 100


@dataclasses.dataclass
class TestFile:
    project: str
    module: str
    options: tuple[str, ...] = ()
    # The names of tests that are not run, and why.
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)


# The slowest first.
FILES = [
    TestFile(
        "tfrs", "tensorflow_recommenders.experimental.models.ranking_test"
    ),
    TestFile(
        "tfmodels",
        "official.recommendation.ranking.train_test",
        (
            *("-p", "train_flags"),
            # Its other tests connect to a TPU.
            *("-k", "OneDevice or Mirrored"),
            # DLRM-DCNv2 is configured to use TPUEmbedding instead.
            *("--without-layer", "DlrmDcnV2"),
        ),
    ),
    TestFile(
        "tfmodels",
        "official.recommendation.ranking.task_test",
        ("--without-layer", "test_task[89]$"),  # DLRM-DCNv2 once more.
    ),
    TestFile(
        "tfrs",
        "tensorflow_recommenders.experimental.layers.embedding"
        ".partial_tpu_embedding_test",
    ),
    TestFile(
        "keras_rs",
        "keras_rs.src.layers.embedding.distributed_embedding_test",
        left_out={
            **{
                f"test_basics_{kind}_{placement}": "counts keras_rs's "
                "sublayers and trainable variables, one to a table"
                for kind in ("dense", "ragged", "sparse")
                for placement in ("auto", "default_device")
            },
            "test_mixed_placement": "needs a TPU",
            "test_update_stats_init": "demands that update_stats be an error "
            "with TensorFlow",
        },
    ),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    projects = sorted({file.project for file in FILES})
    parser.add_argument("project", nargs="?", choices=projects)
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="run each Nth test of a file only [all]",
    )
    flags = parser.parse_args()
    project, without = flags.project, None
    files = [file for file in FILES if project in (None, file.project)]
    if any(file.project == "tfmodels" for file in files):
        install()
    if any(file.project == "keras_rs" for file in files):
        try:
            clone_keras_rs()
        except (OSError, subprocess.SubprocessError) as error:
            if project:
                sys.exit(f"{NO_KERAS_RS} {error}")
            files = [file for file in files if file.project != "keras_rs"]
            without = f"==== LEFT OUT: {NO_KERAS_RS} {error}"
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(SIDE_BY_SIDE) as pool,
    ):
        passed = list(
            pool.map(lambda file: run(file, flags.every, scratch), files)
        )
    if without:
        print(without)
    sys.exit(not all(passed))


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


def clone_keras_rs():
    """Puts keras_rs's repository in KERAS_RS, unless it is there.

    Raises:
        OSError: there is no git.
        subprocess.SubprocessError: it can't be cloned.
    """
    git = ["git", "-C", KERAS_RS]
    rev_parse = [*git, "rev-parse", "--show-toplevel", "HEAD"]
    if KERAS_RS.exists():
        found = subprocess.run(rev_parse, capture_output=True, text=True)
        if found.stdout.split() == [str(KERAS_RS), KERAS_RS_COMMIT]:
            return
        shutil.rmtree(KERAS_RS)
    clone = ["git", "clone", "--quiet", "--no-checkout"]
    source = os.environ.get("KERAS_RS") or KERAS_RS_URL
    # Without --depth, which takes a path for a URL only.
    clone += ["--single-branch", "--branch", KERAS_RS_TAG, source, KERAS_RS]
    # Where there is no way to it, that shows late, or git asks for a password.
    subprocess.run(
        clone,
        check=True,
        timeout=120,
        env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
    )
    checkout = [*git, "checkout", "--quiet", "--detach", KERAS_RS_COMMIT]
    subprocess.run(checkout, check=True)


def run(file, every, scratch):
    """Runs a file's tests and prints what came of it.

    Args:
        file: the TestFile.
        every: how many of its tests there are to each that is run.
        scratch: an empty folder for whatever the tests write.

    Returns:
        Whether tests have run and all of them have passed.
    """
    name = file.module.rpartition(".")[-1]
    path = [HERE, ROOT]
    if file.project == "tfmodels":
        path.append(SITE)
    of_keras_3 = file.project == "keras_rs"
    if of_keras_3:
        path.append(KERAS_RS)
    path.extend(filter(None, [os.environ.get("PYTHONPATH")]))
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TEST_TMPDIR": scratch,
        "TF_USE_LEGACY_KERAS": "0" if of_keras_3 else "1",
        "TMPDIR": scratch,
    }
    command = [sys.executable, "-m", "pytest", "--pyargs", file.module]
    swap = "keras_rs" if of_keras_3 else "tfrs"
    command += ["-p", "swap", "--swap", swap, *file.options]
    for test in file.left_out:
        command += ["--leave-out", test]
    command += ["--every", str(every)]
    command += ["-q", "-rfE", "--tb=short", "--show-capture=no"]
    # Not this project's own settings, nor its cache.
    command += ["-c", os.devnull, "--rootdir", scratch]
    command += ["-p", "no:cacheprovider"]
    BUILD.mkdir(parents=True, exist_ok=True)
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
    for test, reason in file.left_out.items():
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

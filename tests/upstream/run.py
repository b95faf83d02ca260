"""Runs other projects' own tests on this package's PartialTPUEmbedding.

    python tests/upstream/run.py [--every N] [tfrs|tfmodels]

The tests are those inside the installed wheels: of TensorFlow Recommenders,
where the layer takes the place of the one of the same name, and of TF-models,
whose ranking model gets it from there.
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

# Two files take nearly all of the time.
SIDE_BY_SIDE = 2

# Of a failure's output: the last traceback and the list of failed tests.
FAILURE_LINES = 100


@dataclasses.dataclass
class TestFile:
    project: str
    module: str
    options: tuple[str, ...] = ()


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
    project = flags.project
    files = [file for file in FILES if project in (None, file.project)]
    if any(file.project == "tfmodels" for file in files):
        install()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(SIDE_BY_SIDE) as pool,
    ):
        passed = list(
            pool.map(lambda file: run(file, flags.every, scratch), files)
        )
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
    path.extend(filter(None, [os.environ.get("PYTHONPATH")]))
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TEST_TMPDIR": scratch,
        "TF_USE_LEGACY_KERAS": "1",
        "TMPDIR": scratch,
    }
    command = [sys.executable, "-m", "pytest", "--pyargs", file.module]
    command += ["-p", "swap", *file.options, "--every", str(every)]
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

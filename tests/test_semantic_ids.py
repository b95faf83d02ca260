"""The example that rates cold movies by prefixes of their codes."""

import importlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from absl.flags import FLAGS

import movielens_files
from documentation import ROOT
from run_in_processes import environment

pytestmark = pytest.mark.tools

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def example():
    """The program's module, without the flags that it defines."""
    before = set(FLAGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        # Else it would import TensorFlow with its output held back.
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
        yield importlib.import_module("semantic_ids")
    for name in set(FLAGS) - before:
        delattr(FLAGS, name)


def test_codes_tell_all_movies_apart_and_begin_alike_for_alike_ones(example):
    rng = np.random.default_rng(0)
    kinds = np.eye(4)[rng.integers(4, size=50)]
    vectors = kinds + 0.01 * rng.normal(size=kinds.shape)
    codes = example.make_codes(vectors, 4, 3, seed=1)
    assert len({*map(tuple, codes.tolist())}) == 50
    for kind in np.eye(4):
        [first] = {*codes[(kinds == kind).all(1), 0].tolist()}
        assert not (codes[(kinds != kind).any(1), 0] == first).any()
    assert len(np.unique(codes[:, :2], axis=0)) == 4 * 3


def test_k_means_has_no_more_clusters_than_different_vectors(example):
    vectors = np.array([[0.0, 1], [0, 1], [2, 0], [0, 1]])
    found = example.k_means(vectors, 9, np.random.default_rng(0))
    assert found[0] == found[1] == found[3] != found[2]


def test_it_is_trained_without_cold_movies_and_tells_their_error(tmp_path):
    movielens_files.write(tmp_path)
    command = [sys.executable, str(EXAMPLES / "semantic_ids.py")]
    command += ["--data", str(tmp_path), "--epochs", "2"]
    done = subprocess.run(
        command,
        env={**os.environ, **environment("")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts, prefixes, *of_models, last = done.stdout.splitlines()
    numbers = [int(n) for n in re.findall(r"\d+", counts.replace(",", ""))]
    train, test, of_cold, cold_movies = numbers
    assert sum(numbers[:3]) <= movielens_files.RATINGS
    assert train > test > 0 and of_cold > cold_movies > 0
    assert prefixes.startswith("80 codes have ")
    assert [line.partition(":")[0] for line in of_models] == ["ids", "prefixes"]
    pattern = r"cold_rmse_ids=\d\.\d{4} cold_rmse_prefixes=\d\.\d{4}"
    assert re.fullmatch(pattern, last)
    command[-1] = "0"
    wrong = subprocess.run(command, capture_output=True, text=True)
    assert wrong.returncode == 1 and "--epochs=0" in wrong.stderr

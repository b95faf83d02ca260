"""Right calls of the kernels' operations give numbers, and wrong ones errors.

A saved model may have operations with any inputs and attributes.
"""

import functools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import isolated_calls
from invalid_graphs import GRAPHS
from right_calls import CALLS, registered
from sanitize import fuzz
from wrong_calls import CASES, INVALID

pytestmark = pytest.mark.usefixtures("needs_kernels")


@pytest.mark.parametrize("name", CALLS)
def test_a_right_call_gives_the_right_numbers(name):
    CALLS[name]().run_right()
    for shapes in (False, True):
        call = CALLS[name]()
        call.check(call.run_in_graph(shapes=shapes))


@pytest.mark.parametrize("seed", range(2))
def test_random_calls_give_the_right_numbers(seed):
    """As `make sanitize` makes them, with sanitizers and many more."""
    fuzz.try_all(np.random.default_rng(seed))


def test_each_operation_has_right_calls_and_wrong_ones():
    operations = set(registered())
    assert {make().operation for make in CALLS.values()} == operations
    wrong = {CALLS[case.call]().operation for case in CASES.values()}
    # It has no arguments.
    assert wrong == operations - {CALLS["loops"]().operation}


@functools.cache
def outcomes():
    """What all of them do, in processes of their own: some may crash."""
    done = subprocess.run(
        [sys.executable, isolated_calls.__file__],
        capture_output=True,
        text=True,
        # The allocator of oneDNN waits 10 seconds for memory that there isn't.
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


IN_ONE_PROCESS = pytest.mark.xdist_group("isolated_calls")


@IN_ONE_PROCESS
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_call_is_an_error_that_changes_nothing(name):
    case = CASES[name]
    eagerly, *in_graph = outcomes()[name]
    right = f"{case.error}: .*({case.message})"
    assert re.match(right, eagerly, re.DOTALL), (case, eagerly)
    # Shapes are inferred first, which Python raises as its own error.
    right = right.replace(INVALID, f"({INVALID}|ValueError)", 1)
    assert re.match(right, *in_graph, re.DOTALL), (case, in_graph)


@IN_ONE_PROCESS
@pytest.mark.parametrize("name", GRAPHS)
def test_a_pass_leaves_a_graph_that_it_does_not_understand(name):
    [found] = outcomes()[name]
    assert re.match(GRAPHS[name][1], found, re.DOTALL), found

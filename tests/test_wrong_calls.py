"""Operations on keys, spills and files refuse calls that can't be right.

A SavedModel may have such calls. Those of an operation are in a process of
their own: a missing check may end it, or hang.
"""

import os

import pytest
import tensorflow as tf

import wrong_calls
from forks import ForkServer
from tfrs_embed.storage.key_rules import KeyRules
from tfrs_embed.storage.key_table import KeyTable
from wrong_calls import MAX, MIN, int64

pytestmark = pytest.mark.usefixtures("needs_kernels")


@pytest.fixture(scope="module")
def server():
    modules = ["tensorflow", "numpy", "tfrs_embed", "wrong_calls"]
    with ForkServer(modules, {}) as forks:
        yield forks


@pytest.mark.parametrize(
    "operation", dict.fromkeys(case[0] for case in wrong_calls.CASES)
)
def test_wrong_calls_are_errors_that_change_nothing(
    server, tmp_path, operation
):
    log = tmp_path / "log"
    command = [wrong_calls.__file__, operation]
    fork = server.start(command, dict(os.environ), log)
    code = fork.wait(wrong_calls.SECONDS + 60)
    # The last call that it names has failed.
    assert code == 0, log.read_text()[-5000:]


@pytest.mark.parametrize("policy", ["lru", "lfu", "ttl"])
def test_counts_and_steps_may_be_any(policy):
    ttl = MAX if policy == "ttl" else 0
    rules = KeyRules(2, 2, 4, threshold=2, policy=policy, ttl=ttl, evicts=True)
    table = KeyTable(rules)

    def commit(keys, counts, step):
        rows = tf.zeros([len(keys)], tf.int64)
        given = table.commit(tf.constant(keys), int64(*counts), rows, step)
        table.publish(given.versions)

    def most():
        live = table.live()
        return dict(zip(live.keys, live.frequency, strict=True))

    # The second is no occurrence, and the third one is a candidate.
    commit(int64(1, 1, 2, 3), [MAX, MAX, MIN, 1], MAX)
    assert most() == {1: MAX}
    commit(int64(1, 3, 3), [MAX, MAX, MAX], MIN)
    assert most() == {1: MAX, 3: MAX}
    assert table.statistics()[[3, 7]].tolist() == [MAX, MAX]
    commit(int64(1, 4), [1, 2], MIN)
    assert most() == {1: MAX, 4: 2}

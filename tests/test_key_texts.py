"""Tables that keep the text of string keys: `DynamicKeys(keep_text=True)`."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from dynamic_layers import fingerprint
from keras_under_test import keras
from process_tiers import has_kernels, nightly, on, without_kernels
from text_layers import inputs_of, make, require_texts, step_of
from tfrs_embed import (
    DynamicKeys,
    FileStorage,
    FrequencyAdmission,
    TimeToLive,
    kernels,
)
from tfrs_embed.storage.key_texts import KeyTexts, _Learners
from tfrs_embed.storage.text_exchange import unpack
from training_helpers import differentiate

pytestmark = [
    pytest.mark.usefixtures("both_implementations"),
    on("keras:3", tier="nightly"),
]
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def of_other_mode(graph, both_implementations):
    """Whether it is neither a graph with the kernels nor eager without."""
    return has_kernels() and graph == (both_implementations == "tensorflow")


RULES = {
    "lru": dict(eviction="lru"),
    "lfu": dict(eviction="lfu", admission=FrequencyAdmission(2)),
    "ttl": dict(eviction=TimeToLive(2), when_full="grow", max_rows=30),
    "chance": dict(admission=tfrs_embed.ProbabilisticAdmission(0.5)),
    "open": dict(eviction=None, when_full="grow"),
}


@nightly(of_other_mode)
@MODES
@pytest.mark.parametrize("rule", RULES)
def test_keys_are_the_strings_of_steps(rule, graph):
    layer, rng = make(rows=20, **RULES[rule]), np.random.default_rng(0)
    table, step, seen = layer.tables["items"], step_of(layer, graph), set()
    for i in range(10):
        word = [b"%d-\xff" % n for n in rng.integers(2 * i, 2 * i + 8, 6)]
        words = [[b"sku-%d" % n] for n in rng.integers(i, i + 5, 3)]
        words[0] = words[0] * 3
        seen.update(*words, word)
        step(inputs_of(word, words))
        require_texts(table, seen)
    assert table.statistics()["text"]["unknown"] == 0 < table.size


@nightly(of_other_mode)
@MODES
def test_padding_and_sparse_strings(graph):
    layer = make(padding="")
    step = step_of(layer, graph)
    step(inputs_of(["a"], tf.constant([["b", ""], ["", ""]])))
    sparse = tf.sparse.from_dense(tf.constant([["c", ""], ["", "d"]]))
    step(inputs_of(["a"], sparse))
    require_texts(layer.tables["items"], [b"a", b"b", b"c", b"d"])


@nightly(of_other_mode)
@MODES
def test_a_layer_that_is_called_twice_in_a_step(graph):
    layer = make()

    def step(a, b):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                tf.reduce_sum(layer(inputs, partial=True)["word"])
                for inputs in ({"word": a}, {"word": b})
            )
        differentiate(tape, loss, layer.trainable_variables)

    run = tf.function(step) if graph else step
    run(tf.constant(["x", "y"]), tf.constant(["y", "z"]))
    require_texts(layer.tables["items"], [b"x", b"y", b"z"])


def test_lookups_without_training_learn_nothing():
    layer = make()
    layer(inputs_of(["a"], [["b"]]), training=False)
    assert layer.tables["items"].statistics()["text"]["keys"] == 0


def test_a_step_that_fails_leaves_no_text():
    layer = make(rows=2, eviction=None)
    table, step = layer.tables["items"], step_of(layer)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no room"):
        step(inputs_of(["a", "b"], [["c"]]))
    require_texts(table, [])
    for i in range(80):  # No step commits what these lookups reserve.
        layer(inputs_of([f"x{i}"], [[f"y{i}"]]), training=True)
    require_texts(table, [])
    assert len(table.key_texts._reserved) <= 2 + 64 * 2
    step(inputs_of(["a"], [["c"]]))
    require_texts(table, [b"a", b"c"])


def test_a_step_of_many_shards_in_a_growing_table():
    texts = KeyTexts("items", 2)
    keys = np.arange(40_000).reshape(40, 1000)
    for each in keys:
        texts.reserve(each, 1)
    for each in keys:
        texts.learn(each, [b"%d" % key for key in each])
        texts.admit(each)
    counts = texts.counts()
    assert counts["keys"] == 40_000 and not counts["unknown"]


def test_methods_between_steps_keep_and_forget_texts():
    layer = make(rows=8)
    table = layer.tables["items"]
    table.assign(["a", "b"], np.ones([2, 2]))
    step_of(layer)(inputs_of(["c", "d"], [["e"]]))
    require_texts(table, [b"a", b"b", b"c", b"d", b"e"])
    assert table.lookup(["a", "f"])[1] == -1
    assert table.remove(["c", "f"]) == 1
    require_texts(table, [b"a", b"b", b"d", b"e"])
    table.evict(1)
    assert table.size == len(table.keys()) == 3
    assert table.statistics()["text"]["keys"] == 3
    table.give_rows(["e", "g"])
    require_texts(table, [b"e", b"g"])
    for again in (
        lambda: table.assign(["e"], np.ones([1, 2])),
        lambda: table.give_rows(["e", "g"]),
        lambda: step_of(layer)(inputs_of(["e"], [["e"]])),
    ):
        table.remove(["e"])
        again()
        step_of(layer)(inputs_of(["g", "h"], [["i"]]))
        require_texts(table, [b"e", b"g", b"h", b"i"])
        assert table.statistics()["text"]["unknown"] == 0
        table.give_rows(["e", "g"])
    assert layer.statistics()["items"].keys.text == {
        **table.statistics()["text"]
    }
    table.variables["keys"].assign(np.sort([fingerprint(b"g"), 7]))
    require_texts(table, [b"g"])
    assert table.statistics()["text"]["unknown"] == 1


@nightly(of_other_mode)
@MODES
def test_unknown_texts_are_learned_when_a_step_has_the_string(graph):
    layer = make(rows=5000, eviction=None)
    table, step = layer.tables["items"], step_of(layer, graph)
    names = [b"name %d" % i for i in range(4000)]
    table.variables["keys"].assign(np.sort([*map(fingerprint, names)]))
    require_texts(table, [])
    seen = []
    for first in (0, 10, 2000, 3990):
        seen += names[first : first + 1500]
        step(inputs_of(names[first : first + 1500], [["new"]]))
        require_texts(table, [*seen, b"new"])


def test_texts_of_many_evicted_keys_are_gone():
    layer = make(rows=16)
    table, step = layer.tables["items"], step_of(layer, graph=True)
    for i in range(200):
        step(inputs_of([f"{i}-{j:0100}" for j in range(6)], [["same"]]))
        found = table.statistics()["text"]
        assert found["keys"] == table.size <= 16
        assert found["bytes"] < 17 * 110
    texts = table.key_texts
    assert not texts._reserved and not texts.wanted.few and not texts._unknown
    assert table.statistics()["in_all"]["evicted"] > 1000


def test_changes_are_tracked_as_without_texts():
    found = []
    for keep_text in (False, True):
        layer = make(rows=6, keep_text=keep_text)
        table, step = layer.tables["items"], step_of(layer)
        step(inputs_of(["a", "b", "c"], [["d"]]))
        table.track_changes()
        moments = [table.moment()]
        for word in ("efg", "hij", "abc"):
            step(inputs_of([*word], [["d"]]))
            table.remove(["j"])
            moments.append(table.moment())
        changes = [table.changed(m) for m in moments]
        found.append([[sorted(c.rows), sorted(c.removed)] for c in changes])
        for i in range(9):  # More than are remembered.
            step(inputs_of([f"{i}{j}" for j in range(5)], [["d"]]))
        with pytest.raises(ValueError, match="lost sight of"):
            table.moment()
            table.changed(moments[0])
    assert found[0] == found[1]


def test_an_average_gets_the_texts():
    layer, other = make(), make()
    step_of(layer)(inputs_of(["a", "b"], [["c"]]))
    other.assign_moving_average(layer, 0.5)
    require_texts(other.tables["items"], [b"a", b"b", b"c"])


def test_of_two_strings_with_one_fingerprint_the_first_stays():
    texts, keys = KeyTexts("items", 2), np.array([5, 6])
    texts.reserve(keys, 1)
    texts.learn(keys, [b"first", b"other"])
    texts.learn(keys, [b"second", b"other"])
    texts.admit(keys)
    texts.learn(keys, [b"third", b"other"])
    assert texts.of(np.array([5, 6, 7])).tolist() == [b"first", b"other", b""]
    assert texts.counts() == {"keys": 2, "unknown": 0, "bytes": 10}


@nightly(without_kernels)
def test_texts_of_other_workers_keys_are_sent_once_and_not_kept():
    # Nothing is exchanged here: only whether there are others matters.
    texts, none = KeyTexts("items", 2, object()), np.zeros([0], np.int64)
    texts.add(np.array([1]), np.array([7, 8, 9]), [], np.array([1, 7, 8, 9]))
    # Key 7 has lost its row on the other worker.
    texts.add(np.array([2]), np.array([10]), [], np.array([1, 2, 8, 9, 10]))
    many, few = (each.numpy()[:-1].tolist() for each in texts.wanted.read())
    assert (many, few) == ([1, 2, 8, 9, 10], [])
    keys, words = np.array([8, 1]), np.array([b"eight", b"one"], object)
    texts.learn(keys, words)
    assert texts.counts() == {"keys": 1, "unknown": 1, "bytes": 3}
    learners = _Learners([texts])
    for asked, sent in ((none, []), (np.array([8]), [b"eight"])):
        message = learners.message(keys, words, asked)
        assert unpack(message)[1] == sent


def test_a_spill_keeps_the_texts_of_its_keys(tmp_path):
    if kernels.operations("CPU:0") is None:
        pytest.skip("A spill needs kernels.")
    layer = make(rows=4, spill=FileStorage(tmp_path))
    table, step, seen = layer.tables["items"], step_of(layer), []
    for i in range(12):
        words = [b"%d" % (i % 9), b"%d" % (i % 7), b"x%d" % i]
        seen += words
        step(inputs_of(words[:2], [words[2:]]))
        require_texts(table, seen)
    assert table.statistics()["spill"]["keys"] > 10
    table.remove(["x3"])
    table.evict(2)
    assert table.statistics()["text"]["keys"] == table.size == 18
    table.track_changes()
    before = table.moment()
    step(inputs_of(["x3", "q"], [["r"]]))
    assert fingerprint(b"q") in table.changed(before).rows
    require_texts(table, [*seen, b"q", b"r"])


def test_graphs_do_not_keep_the_texts():
    def use():
        layer = make()
        step_of(layer, graph=True)(inputs_of(["a"], [["b"]]))
        texts = layer.tables["items"].key_texts
        assert isinstance(texts, KeyTexts)
        return weakref.ref(texts)

    texts = use()
    keras.backend.clear_session()
    gc.collect()
    assert texts() is None


def test_configs_keep_the_option():
    layer = make()
    copy = type(layer).from_config(layer.get_config())
    declared = copy.tables["items"].spec.keys
    assert declared == layer.tables["items"].spec.keys
    assert declared.keep_text


def test_keep_text_needs_strings():
    with pytest.raises(ValueError, match=r"keep_text=True is for .*not int64"):
        DynamicKeys(keep_text=True)
    with pytest.raises(TypeError, match="keep_text must be True or False"):
        DynamicKeys(tf.string, keep_text=1)

"""The example that predicts the next movie: its files, ranking and model."""

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import movielens_files
from documentation import ROOT
from process_tiers import nightly
from run_in_processes import environment

pytestmark = pytest.mark.tools

EXAMPLES = ROOT / "examples"
ITEMS = 12


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(name)


@pytest.fixture
def data(monkeypatch):
    return load("movielens_sequences", monkeypatch)


@pytest.fixture
def make_model(monkeypatch):
    def make(**options):
        keras.utils.set_random_seed(0)
        return load("sasrec", monkeypatch).SASRec(
            ITEMS,
            keras.optimizers.Adam(0.02),
            **{"dim": 8, "length": 5, "blocks": 2, "heads": 2, **options},
        )

    return make


@pytest.fixture
def make_hstu(monkeypatch):
    def make(**options):
        keras.utils.set_random_seed(0)
        return load("hstu", monkeypatch).HSTU(
            ITEMS,
            keras.optimizers.Adam(0.02),
            **{"dim": 8, "length": 5, "blocks": 2, "heads": 2, **options},
        )

    return make


def with_times(history, times=None):
    """Inputs of HSTU; an item comes 100 seconds after the one before it."""
    if times is None:
        places = tf.ragged.range(history.row_lengths()).values
        times = history.with_values(1000 + 100 * tf.cast(places, tf.int64))
    return {"history": history, "time": times}


def ragged(*rows):
    return tf.ragged.constant(rows, dtype=tf.int64, inner_shape=())


# Files.


def test_ratings_are_histories_in_the_order_of_time(data, tmp_path):
    path = tmp_path / "ratings"
    for text in (
        "7::30::5::200\n3::20::1::900\n7::10::2::100\n7::20::4::100\n",
        "7\t30\t5\t200\n3\t20\t1\t900\n7\t10\t2\t100\n7\t20\t4.5\t100\n",
        "7 10\n7 20\n3 20\n7 30\n",
    ):
        path.write_text(text)
        histories, movie_ids = data.read(path)
        assert [h.tolist() for h in histories] == [[1], [0, 1, 2]]
        times = [t.tolist() for t in data.read_with_times(path)[1]]
        with_times = [[900], [100, 100, 200]]
        assert times == ([[0], [0, 0, 0]] if text[1] == " " else with_times)
        assert movie_ids.tolist() == [10, 20, 30]
        histories, movie_ids = data.read(path, header=1, min_ratings=2)
        assert [h.tolist() for h in histories] == [[0], [0]]
        assert movie_ids.tolist() == [20]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2\n1 x\n", "ratings: could not convert string 'x'"),
        ("1 2\n1 2 3\n", "ratings: .*number of columns changed"),
        ("1 2 3\n", "ratings has 3 columns: 2 or 4 are expected"),
        ("", "ratings has no ratings"),
    ],
)
def test_a_line_that_is_no_rating_is_an_error(data, tmp_path, text, message):
    path = tmp_path / "ratings"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        data.read(path)


def test_windows_end_where_histories_end(data):
    windows = data.cut([np.arange(5), np.arange(1), np.arange(0)], 2)
    assert [w.tolist() for w in windows] == [[3, 4], [1, 2], [0], [0]]


def test_ranks_count_who_is_better_or_as_good(data):
    scores = np.zeros([3, 20])
    scores[0, :3], scores[0, 3] = [5, 4, 3], 2
    scores[1, :12], scores[1, 12] = 9, 8
    right, seen = np.array([3, 12, 7]), ragged([1, 3], list(range(5)), [])
    # Third of 20; 13th; as good as all others.
    hr, ndcg = data.metrics(scores, right, None)
    assert hr == pytest.approx(1 / 3)
    assert ndcg == pytest.approx(1 / 3 / np.log2(5))
    # What was rated isn't ranked, but for the right one.
    hr, ndcg = data.metrics(scores, right, seen)
    assert hr == pytest.approx(2 / 3)
    assert ndcg == pytest.approx((1 / np.log2(4) + 1 / np.log2(9)) / 3)


# The model.


def test_scores_depend_on_a_histories_last_items_alone(make_model):
    model = make_model()
    batch = ragged([1, 2, 3, 4, 5, 6, 7], [], [8], [4, 5, 6, 7, 11])
    scores = model(batch).numpy()
    assert scores.shape == (4, ITEMS) and np.isfinite(scores).all()
    for i in range(4):
        np.testing.assert_allclose(
            model(batch[i : i + 1])[0], scores[i], rtol=1e-4, atol=1e-6
        )
    cut = model(ragged([3, 4, 5, 6, 7]))
    np.testing.assert_allclose(cut[0], scores[0], rtol=1e-4, atol=1e-6)
    assert model(batch[:0]).shape == (0, ITEMS)


def test_states_do_not_see_what_comes_later(make_model):
    model = make_model()
    rng = np.random.default_rng(0)
    values = rng.normal(size=[4, 8]).astype(np.float32)
    changed = values.copy()
    changed[3] *= -1
    states = [
        model.read(tf.RaggedTensor.from_row_lengths(v, [4]), False).values
        for v in (values, changed)
    ]
    np.testing.assert_allclose(states[0][:4], states[1][:4], rtol=1e-5)
    assert np.abs(states[0][4] - states[1][4]).max() > 1e-3


@pytest.mark.parametrize("negatives", [None, 6])
def test_the_loss_is_the_cross_entropy_of_the_next_items(make_model, negatives):
    model = make_model(dropout=0.0, negatives=negatives)
    history = ragged([1, 2, 3], [], [4])
    model(history, training=True)
    [loss] = model.losses
    if negatives is None:
        # Scores after nothing, after 1 and so on.
        scores = model(ragged([], [1], [1, 2], []))
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(
            history.values, scores
        )
        assert float(loss) == pytest.approx(float(tf.reduce_mean(each)), 1e-4)
    assert 0 < float(loss) < 3
    model(history[:0], training=True)
    assert float(model.losses[0]) == 0


@pytest.mark.parametrize(
    ("negatives", "size_threshold"), [(None, 0), (6, None)]
)
def test_it_learns_a_cycle(make_model, negatives, size_threshold):
    model = make_model(
        dropout=0.0,
        blocks=1,
        negatives=negatives,
        size_threshold=size_threshold,
    )
    model.compile(keras.optimizers.Adam(0.02))
    starts = np.arange(ITEMS)
    rows = [(start + np.arange(6)) % ITEMS for start in starts]
    batches = tf.data.Dataset.from_tensors(ragged(*rows)).repeat(150)
    losses = model.fit(batches, epochs=1, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    # After as many as it reads.
    best = np.argmax(model(ragged(*(row[:5] for row in rows))), axis=1)
    assert np.mean(best == (starts + 5) % ITEMS) > 0.9


def test_ids_out_of_range_are_errors(make_model):
    model = make_model()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"items.*12 rows"):
        model(ragged([1, ITEMS]))


# HSTU.


def test_hstu_scores_depend_on_a_histories_last_items_alone(make_hstu):
    model = make_hstu()
    batch = ragged([1, 2, 3, 4, 5, 6, 7], [], [8], [4, 5, 6, 7, 11])
    scores = model(with_times(batch)).numpy()
    assert scores.shape == (4, ITEMS) and np.isfinite(scores).all()
    for i in range(4):
        np.testing.assert_allclose(
            model(with_times(batch[i : i + 1]))[0],
            scores[i],
            rtol=1e-4,
            atol=1e-6,
        )
    cut = model(with_times(ragged([3, 4, 5, 6, 7])))
    np.testing.assert_allclose(cut[0], scores[0], rtol=1e-4, atol=1e-6)
    assert model(with_times(batch[:0])).shape == (0, ITEMS)


def test_hstu_tells_times_apart_but_not_when_all_is_later(make_hstu):
    model = make_hstu()
    history = ragged([1, 2, 3])
    one, later, slower = (
        model(with_times(history, ragged(times))).numpy()
        for times in (
            [1000, 1100, 1200],
            [1500, 1600, 1700],
            [1000, 1100, 9000],
        )
    )
    np.testing.assert_allclose(one, later, rtol=1e-5, atol=1e-6)
    assert np.abs(one - slower).max() > 1e-5


def test_hstu_states_do_not_see_what_comes_later(make_hstu):
    model = make_hstu()
    values = np.random.default_rng(0).normal(size=[4, 8]).astype(np.float32)
    changed = values.copy()
    changed[3] *= -1
    times = [[1000, 1100, 1200, 1300], [1000, 1100, 1200, 99000]]
    states = [
        model.read_with_times(
            tf.RaggedTensor.from_row_lengths(v, [4]), ragged(t), False
        ).values
        for v, t in zip((values, changed), times, strict=True)
    ]
    np.testing.assert_allclose(states[0][:4], states[1][:4], rtol=1e-5)
    assert np.abs(states[0][4] - states[1][4]).max() > 1e-3


def test_hstu_attends_without_a_softmax(make_hstu):
    """One block, one head, against the paper's formula in numpy."""
    model = make_hstu(blocks=1, heads=1)
    [block] = model.blocks
    rows = ragged([0, 0, 0]).with_values(
        tf.random.stateless_normal([3, 8], [1, 2])
    )
    bucket = tf.constant([[[0, 0, 0], [3, 0, 0], [5, 4, 0]]])
    found = block(rows, bucket).numpy()

    def normed(x):
        x = x - x.mean(axis=1, keepdims=True)
        return x / np.sqrt(x.var(axis=1, keepdims=True) + 1e-6)

    def silu(x):
        return x / (1 + np.exp(-x))

    x = rows.values.numpy()
    projected = silu(normed(x) @ block.project.kernel.numpy())
    gate, value, query, key = np.split(projected, 4, axis=1)
    seen = np.zeros_like(value)
    for i in range(3):
        for j in range(i + 1):
            bias = (
                block.of_places[i - j, 0] + block.of_times[bucket[0, i, j], 0]
            )
            weight = silu(query[i] @ key[j] + bias.numpy()) / block.length
            seen[i] += weight * value[j]
    expected = x + (normed(seen) * gate) @ block.out.kernel.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_hstu_learns_a_cycle(make_hstu):
    model = make_hstu(dropout=0.0, blocks=1)
    model.compile(keras.optimizers.Adam(0.02))
    starts = np.arange(ITEMS)
    rows = [(start + np.arange(6)) % ITEMS for start in starts]
    inputs = with_times(ragged(*rows))
    batches = tf.data.Dataset.from_tensors(inputs).repeat(150)
    losses = model.fit(batches, epochs=1, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    asked = with_times(ragged(*(row[:5] for row in rows)))
    best = np.argmax(model(asked), axis=1)
    assert np.mean(best == (starts + 5) % ITEMS) > 0.9


# Serving.


def test_what_was_rated_is_not_recommended(data, make_model):
    model = make_model()
    numbers = 100 + 10 * np.arange(ITEMS)
    titles = [f"title {i}" for i in numbers]
    recommend = data.Recommender(model, numbers, titles)
    # Longer than what is read, and than ten less than all.
    rated = [[100, 120, 130, 140, 150, 160, 170, 180], [], [120]]
    found = recommend(ragged(*rated))
    for i, row in enumerate(rated):
        rest = 10 if len(row) < 3 else ITEMS - len(row)
        best = found["movie_id"].numpy()[i, :rest]
        assert not set(best) & set(row)
        scores = found["score"].numpy()[i]
        assert np.isfinite(scores[:rest]).all()
        assert not np.isfinite(scores[rest:]).any()
        assert found["title"][i, 0] == f"title {best[0]}".encode()
    with pytest.raises(tf.errors.InvalidArgumentError):
        recommend(ragged([100, 101]))


# The program.


# CI trains it on one device, with `make sequences`.
@nightly(lambda strategy: strategy == "none")
@pytest.mark.parametrize("strategy", ["none", "mirrored:2"])
def test_the_program_trains_and_exports(tmp_path, strategy):
    movielens_files.write(tmp_path)

    def run(*flags):
        return subprocess.run(
            [
                sys.executable,
                str(EXAMPLES / "sequences.py"),
                *("--data", str(tmp_path), "--output", str(tmp_path / "out")),
                *("--epochs", "2", "--dim", "8", "--length", "15"),
                *("--strategy", strategy, "--negatives", "20"),
                *("--min_ratings", "1", *flags),
            ],
            env={**os.environ, **environment("")},
            capture_output=True,
            text=True,
        )

    done = run()
    assert done.returncode == 0, done.stderr
    assert "60 users, 80 movies, 1,200 ratings" in done.stdout
    assert "to whom nothing is known of: part " in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("test_hr=0.") and " test_ndcg=0." in last
    again = run()
    assert again.returncode == 1 and "is there already" in again.stderr

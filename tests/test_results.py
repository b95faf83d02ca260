"""Published results: splits, metrics, the lines of runs, the page's tables."""

import importlib
import itertools
import json
import sys

import numpy as np
import pytest

import movielens_files
from documentation import ROOT

pytestmark = pytest.mark.tools

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def load(monkeypatch):
    """Imports a module of benchmarks/results, for one test."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(RESULTS)
    # Else TensorFlow would be imported with its output held back.
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    before = set(sys.modules)
    yield importlib.import_module
    for name in {path.stem for path in RESULTS.glob("*.py")} - before:
        sys.modules.pop(name, None)


def is_split(rows, train, test):
    return sorted([*train, *test]) == list(rows)


# Splits.


def test_ratings_of_another_order_are_an_error(load):
    with pytest.raises(ValueError, match=r"MD5 .*u\.data has 6e470468"):
        load("splits").check(b"196\t242\t3\t881250949\n")


def test_folds_are_fifths_in_the_order_of_the_file(load):
    splits = load("splits")
    for number in range(1, 6):
        train, test = splits.fold(number)
        assert test.tolist() == [*range((number - 1) * 20_000, number * 20_000)]
        assert is_split(range(100_000), train, test)
    for number in (0, 6):
        with pytest.raises(ValueError, match=f"fold {number}: "):
            splits.fold(number)


def test_validation_reads_no_row_of_the_test(load):
    splits = load("splits")
    train, test = splits.fold(2)
    rest, held_out = splits.validation((train, test))
    assert is_split(train, rest, held_out) and len(held_out) == 8_000


def test_random_splits_have_seeds(load):
    splits = load("splits")
    for split_of in (splits.random, splits.cornac):
        train, test = split_of(3)
        assert len(test) == 20_000 and is_split(range(100_000), train, test)
        assert np.array_equal(split_of(3)[1], test)
        assert not np.array_equal(split_of(4)[1], test)


def test_most_of_a_leaking_test_is_in_its_training_set(load):
    train, test = load("splits").leaking(0)
    assert len(train) == 80_000 and len(test) == 20_000
    assert np.mean(np.isin(test, train)) == pytest.approx(0.8, abs=0.01)


def test_each_movie_has_at_most_three_quarters_to_train(load):
    splits = load("splits")
    rng = np.random.default_rng(0)
    movie = np.minimum(rng.geometric(0.02, 100_000), splits.MOVIES) - 1
    zeros = np.zeros_like(movie)
    ratings = splits.Ratings(zeros, movie, zeros + 1, zeros)
    train, test = splits.recommenders_team(ratings)
    assert is_split(range(100_000), train, test)
    counts = np.bincount(movie)
    in_training = np.bincount(movie[train], minlength=len(counts))
    assert np.array_equal(in_training, np.floor(0.75 * counts))
    # Which ones: those with the smallest of NumPy's random numbers.
    numbers = np.random.RandomState(42).rand(100_000)
    rows = movie == 7
    assert numbers[train][rows[train]].max() < numbers[test][rows[test]].min()


def test_a_matrix_has_who_rated_what(load):
    splits = load("splits")
    columns = [[5, 5, 6], [1, 2, 1], [3, 4, 5], [7, 8, 9]]
    ratings = splits.Ratings(*np.array(columns))
    rated = splits.matrix(ratings, np.array([0, 2]))
    assert np.argwhere(rated).tolist() == [[5, 1], [6, 1]]


# Metrics.


def test_a_choice_ranks_below_the_movies_with_more(load):
    ranks = load("ranking").ranks
    scores = np.array([[3.0, 1, 2, 3], [0, 5, 5, 4]])
    assert ranks(scores, np.array([2, 1])).tolist() == [2, 0]


def test_ndcg_counts_places_among_candidates(load):
    ndcg = load("ranking").ndcg
    scores = np.array([[9.0, 8, 7, 6], [1, 2, 3, 4], [1, 2, 3, 4]])
    candidates = np.array([[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], bool)
    relevant = np.array([[0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
    # Second of the candidates; first, and outside a list of two.
    second = 1 / np.log2(3)
    expected = (second + 1 / (1 + second)) / 2
    assert ndcg(scores, candidates, relevant, 2) == pytest.approx(expected)


def test_auc_is_the_part_of_pairs_in_order(load):
    rng = np.random.default_rng(0)
    scores = rng.integers(5, size=[6, 9]).astype(float)
    candidates, relevant = rng.random([2, 6, 9]) < 0.6
    relevant[5] = False  # Who has none doesn't count.
    areas = []
    for score, candidate, right in zip(
        scores[:5], candidates[:5], relevant[:5], strict=True
    ):
        pairs = itertools.product(
            score[candidate & right], score[candidate & ~right]
        )
        areas.append(np.mean([one > other for one, other in pairs]))
    found = load("ranking").auc(scores, candidates, relevant)
    assert found == pytest.approx(np.mean(areas))


# Runs and tables.


def test_a_run_is_a_line_that_is_read_again(load, capsys):
    record = load("record")
    record.Timer().report("cornac", "a model", "seed 3", auc=np.float32(0.5))
    lines = ["a line of TensorFlow's", *capsys.readouterr().out.splitlines()]
    [run] = record.read(lines)
    assert (run.row, run.model, run.run) == ("cornac", "a model", "seed 3")
    assert run.metrics == {"auc": 0.5} and run.seconds >= 0
    assert record.read([record.to_line(run)]) == [run]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"other": 1}, "other"), ({"metrics": {"auc": float("nan")}}, "finite")],
)
def test_a_line_that_is_no_run_is_an_error(load, changes, message):
    line = {"row": "cornac", "model": "m", "run": "r", "seconds": 1.0}
    line |= {"metrics": {"auc": 0.5}} | changes
    with pytest.raises(ValueError, match=message):
        load("record").read([json.dumps(line)])


def test_a_mean_has_its_standard_error(load):
    mean_and_error = load("record").mean_and_error
    assert mean_and_error([0.5]) == (0.5, None)
    assert mean_and_error([1.0, 2.0, 3.0]) == pytest.approx((2.0, 3**-0.5))


def test_a_table_shows_published_figures_and_means_of_runs(load):
    page, record = load("page"), load("record")
    [row] = [row for row in page.ROWS if row.name == "cornac"]
    runs = [
        record.Run("cornac", "m", f"seed {i}", 10.0 + i, {"ndcg@10": 0.1 * i})
        for i in (1, 3)
    ] + [record.Run("rating_u1", "other", "seed 0", 1.0, {"rmse": 1.0})]
    lines = page.table(row, runs).splitlines()
    assert lines[0] == "| model | NDCG@10 | AUC | runs | seconds a run |"
    assert lines[2].startswith("| BPR ([Cornac](https://") and len(lines) == 4
    assert lines[3] == "| **ours: m** | 0.2000 ± 0.1000 | - | 2 | 12 |"
    assert {line.count("|") for line in lines} == {6}


def test_a_run_that_only_measures_steps_is_no_training(load):
    page, record = load("page"), load("record")
    [row] = [row for row in page.ROWS if row.name == "next_item"]
    metrics = ({"HR@10": 0.25}, {"ms a step": 12.34})
    runs = [
        record.Run("next_item", "m", run, 10.0 * i, metrics[i])
        for i, run in enumerate(("seed 0", "cost"))
    ]
    [line] = page.table(row, runs).splitlines()[3:]
    assert line == "| **ours: m** | 0.2500 | - | - | - | 12.3 | 1 | 0 |"


def test_a_row_that_is_computed_anew_replaces_its_runs(load):
    replaced, record = load("run").replaced, load("record")
    kept = [
        record.Run(row, "m", "seed 0", 1.0, {"x": 0.0})
        for row in ("rating_u1", "cornac")
    ]
    new = record.Run("rating_u1", "m", "seed 0", 1.0, {"x": 1.0})
    assert replaced(kept, "rating_u1", [new]) == [new, kept[1]]


def test_the_page_has_the_tables_of_the_runs(load, tmp_path):
    page, record = load("page"), load("record")
    copy = tmp_path / "results.md"
    copy.write_text(page.PAGE.read_text("utf-8"), "utf-8")
    runs = record.read(record.RUNS.read_text("utf-8").splitlines())
    page.write(runs, copy)
    assert copy.read_text("utf-8") == page.PAGE.read_text("utf-8")
    with pytest.raises(ValueError, match=r"no row: \['other'\]"):
        page.write([record.Run("other", "m", "r", 1.0, {})], copy)
    copy.write_text("no place")
    with pytest.raises(ValueError, match="one place for tables"):
        page.write(runs, copy)


def test_each_row_has_a_program_that_is_there(load):
    rows = load("rows").ROWS
    assert len({row.name for row in rows}) == len(rows)
    assert all((RESULTS / row.program[0]).is_file() for row in rows)


# The rating model's features.


def test_what_is_predicted_is_in_no_bag_of_the_pair(load, tmp_path):
    movielens_files.write(tmp_path)
    movielens, rating = load("movielens"), load("rating")
    split = np.arange(900), np.arange(900, 1200)
    data = movielens.load(tmp_path, 0, split)
    assert len(data.train) == 900 and len(data.test) == 300
    data = rating.with_stars(data)
    train = data.train
    features = data.join(train.user, train.movie)
    users = np.bincount(train.user)
    for i in range(20):
        user, movie = train.user[i], train.movie[i]
        again = np.sum((train.user == user) & (train.movie == movie))
        rated = features["rated"][i].numpy()
        assert movie not in rated // 5 and len(rated) == users[user] - again
        [other, *_] = rated
        stars = train.rating[(train.user == user) & (train.movie == other // 5)]
        assert other % 5 + 1 in stars
        assert user not in features["raters"][i].numpy() // 5


# Lists.


def test_lists_have_ratings_of_one_user_and_none_twice(load):
    lists = load("movielens_lists")
    user = np.array([3, 1, 3, 1, 3, 2, 3])
    movie = np.arange(10, 17)
    drawn = lists.draw(user, movie, movie % 5 + 1, 40, 3, seed=0)
    assert drawn.user.tolist() == [3] * 40  # Others have fewer than 3.
    assert drawn.movie.shape == (40, 3)
    assert {tuple(sorted(row)) for row in drawn.movie} == {
        tuple(some) for some in itertools.combinations([10, 12, 14, 16], 3)
    }
    assert np.array_equal(drawn.stars, drawn.movie % 5 + 1)
    with pytest.raises(ValueError, match="No user has 5 ratings"):
        lists.draw(user, movie, movie, 1, 5, seed=0)


def test_hinge_loss_is_the_sum_over_pairs(load):
    rng = np.random.default_rng(0)
    stars = rng.integers(1, 6, [4, 5])
    scores = rng.normal(size=[4, 5]).astype(np.float32)
    expected = [
        sum(
            max(0, 1 - (score[i] - score[j]))
            for i, j in itertools.permutations(range(5), 2)
            if star[i] > star[j]
        )
        / 5
        for star, score in zip(stars, scores, strict=True)
    ]
    found = load("movielens_lists").pairwise_hinge(stars, scores)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_ndcg_of_a_list_compares_gains_with_the_best_order(load):
    ndcg = load("movielens_lists").ndcg
    stars = np.array([[5, 3, 1]])
    assert ndcg(stars, np.array([[3.0, 2, 1]])) == pytest.approx(1.0)
    gain, second, third = 2**0.5 - 1, 1 / np.log2(3), 0.5
    expected = (third + gain) / (1 + gain * second)
    assert ndcg(stars, np.array([[1.0, 3, 2]])) == pytest.approx(expected)
    assert ndcg(np.ones([1, 3]), np.zeros([1, 3])) == 0
    # Equal scores: the mean of all orders.
    orders = itertools.permutations([1.0, 2, 3])
    mean = np.mean([ndcg(stars, np.array([order])) for order in orders])
    many = np.tile(stars, [20_000, 1])
    assert ndcg(many, np.zeros(many.shape)) == pytest.approx(mean, abs=0.005)


# Histories.


def test_times_are_cut_as_their_histories_are(load):
    data = load("next_item").Data(
        [np.array([5, 6, 7, 8, 9]), np.array([1, 2, 3])],
        [np.array([50, 60, 70, 80, 90]), np.array([10, 20, 30])],
    )
    inputs = data.inputs(slice(0, -1), 3)
    assert inputs["history"].to_list() == [[6, 7, 8], [5], [1, 2]]
    assert inputs["time"].to_list() == [[60, 70, 80], [50], [10, 20]]
    whole = data.inputs(slice(-2, None))
    assert whole["history"].to_list() == [[8, 9], [2, 3]]


def test_the_autoencoder_learns_which_movies_go_together(load, monkeypatch):
    histories, splits = load("histories"), load("splits")
    monkeypatch.setattr(splits, "MOVIES", 6)
    monkeypatch.setattr(splits, "USERS", 40)
    rated = np.zeros([40, 6], bool)
    rated[:20, :3], rated[20:, 3:] = True, True
    read = rated.copy()
    read[0, 2] = read[20, 3] = False  # To be found.
    task = histories.Task(read, read, ~read, rated & ~read)
    settings = histories.Settings(8, 0.5, 0.03, 0.0, 20, 30)
    scores = histories.train(task, settings, 0, False)
    found = histories.metrics(task, scores)
    assert found == {"ndcg@10": 1.0, "auc": 1.0}

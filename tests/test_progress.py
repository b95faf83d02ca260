"""The progress of what takes long: when it shows, where, and what it says."""

import importlib.util
import io
import os
import re
import sys
import threading
import types

import numpy as np
import pytest
import tensorflow as tf
from tfrs_embed.progress import Task

import tfrs_embed
from keras_under_test import keras, layers
from tfrs_embed import progress
from tfrs_embed.checkpoint import bundle
from tfrs_embed.storage import initial_values
from training_helpers import checkpoint_command as main

MB = 10**6


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "_clock", clock)
    return clock


class Stderr(io.StringIO):
    """What is written to stderr, which may be a terminal."""

    terminal = False

    def isatty(self):
        return self.terminal

    @property
    def states(self):
        """All that a line showed, one after the other."""
        return [s for s in re.split(r"[\r\n]+", self.getvalue()) if s.strip()]


def replace(monkeypatch, stderr):
    # pytest sets its own between fixtures and tests.
    monkeypatch.setattr(
        progress,
        "sys",
        types.SimpleNamespace(stderr=stderr, modules=sys.modules),
    )
    return stderr


@pytest.fixture
def stderr(monkeypatch):
    return replace(monkeypatch, Stderr())


@pytest.fixture
def terminal(stderr):
    stderr.terminal = True
    return stderr


@pytest.fixture(autouse=True)
def automatic(monkeypatch):
    monkeypatch.setattr(progress, "_mode", "auto")


def work(clock, seconds, step=0.1, amount=MB, **options):
    """Takes some time, doing a bit of it at a time."""
    steps = round(seconds / step)
    with Task("Saving", "tables", steps * amount, **options) as task:
        for _ in range(steps):
            clock.now += step
            task.advance(amount)
    return task


def test_what_is_short_shows_nothing(clock, terminal):
    task = work(clock, 2.9)
    assert task.done == task.total == 29 * MB
    assert not terminal.getvalue()


def test_a_bar_shows_rate_and_time_left(clock, terminal):
    with Task("Saving", "tables", 100 * MB) as task:
        for _ in range(4):
            clock.now += 1
            task.advance(10 * MB)
        assert terminal.states[-1].rstrip() == (
            "Saving tables: |####      | 40% of 95.4 MiB, 9.5 MiB a second, "
            "0:00:06 left"
        )
        clock.now += 6
        task.advance(60 * MB)
    assert terminal.states[-2].startswith("Saving tables: |##########| 100%")
    done = "Saving tables: done, 95.4 MiB in 0:00:10"
    assert terminal.states[-1].rstrip() == done
    # It covers what was longer.
    assert len(set(map(len, terminal.states))) == 1
    assert terminal.getvalue().endswith("\n")


def test_slow_counts_are_those_of_a_minute(clock, terminal):
    with Task("Compiling", "it", 6, "files") as task:
        clock.now += 40
        task.advance(2)
        assert terminal.states[-1].rstrip() == (
            "Compiling it: |###       | 33% of 6 files, 3.0 files a minute, "
            "0:01:20 left"
        )


def test_controls_in_names_are_escaped(clock, stderr):
    with Task("Reading", "'\x1b[2Ja\r\u202e本'", MB) as task:
        clock.now += 9
        task.advance(MB)
    for state in stderr.states:
        assert state.startswith(r"Reading '\x1b[2Ja\r\u202e本': ")
    assert stderr.states


def test_a_bar_fits_into_the_line(clock, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    work(clock, 5)
    assert {len(state) for state in terminal.states} == {29}


def test_a_bar_is_drawn_some_times_a_second(clock, terminal):
    work(clock, 13, step=0.001)
    assert 39 <= len(terminal.states) <= 43


def test_a_log_has_a_line_now_and_then(clock, stderr):
    work(clock, 70, step=0.5, amount=1 << 20)
    assert stderr.states == [
        "Saving tables: 4% of 140.0 MiB, 2.0 MiB a second, 0:01:07 left",
        "Saving tables: 47% of 140.0 MiB, 2.0 MiB a second, 0:00:37 left",
        "Saving tables: 90% of 140.0 MiB, 2.0 MiB a second, 0:00:07 left",
        "Saving tables: done, 140.0 MiB in 0:01:10",
    ]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_something_small_says_nothing_of_the_rest(clock, stderr, on_terminal):
    # The first of some tables took long, as nothing was traced before.
    stderr.terminal = on_terminal
    with Task("Building", "5 tables", 1000 * MB) as task:
        clock.now += 4
        task.advance(16)
        assert task.left is None
        clock.now += 31
        task.advance(499 * MB)
        assert task.left == pytest.approx(35, rel=0.1)
        clock.now += 40
        task.advance(500 * MB)
    if on_terminal:
        first = "|          | 0% of 953.7 MiB after 0:00:04"
        assert first in stderr.states[0]
        # The line ends with the terminal.
        later = "50% of 953.7 MiB, 13.6 MiB a second, 0:0"
        assert any(later in state for state in stderr.states)
    else:
        assert stderr.states[:2] == [
            "Building 5 tables: 0% of 953.7 MiB after 0:00:04",
            "Building 5 tables: 50% of 953.7 MiB, 13.6 MiB a second, "
            "0:00:35 left",
        ]


def test_what_has_no_known_end_is_counted(clock, stderr):
    def batches():
        for _ in range(5120):
            clock.now += 2**-10
            yield 0

    assert progress.size_of(batches()) is None
    with Task("Reading", "batches", None, "batches") as task:
        assert sum(1 for _ in task.count(batches())) == 5120
    assert stderr.states == [
        "Reading batches: 3,072 batches, 1,024.0 batches a second",
        "Reading batches: done, 5,120 batches in 0:00:05",
    ]


def test_sizes_of_what_is_read():
    data = tf.data.Dataset.range(7)
    assert progress.size_of(data) == 7
    assert progress.size_of(data.repeat()) is None
    assert progress.size_of(data.filter(lambda x: x > 3)) is None
    assert progress.size_of([1, 2]) == 2

    class Unsized(list):
        def __len__(self):
            raise NotImplementedError

    assert progress.size_of(Unsized([1])) is None
    assert progress.size_of({"feature": [1], "other": [2]}) is None


def test_more_than_was_expected(clock, terminal):
    with Task("Saving", "tables", 10, "rows") as task:
        clock.now += 5
        task.advance(15)
        assert "100% of 15 rows" in terminal.states[-1]
    assert task.total == 15


@pytest.mark.parametrize(
    ("mode", "bar"), [("bar", True), ("log", False), ("auto", False)]
)
def test_modes(clock, stderr, mode, bar):
    progress.set_mode(mode)
    work(clock, 5)
    assert ("|" in stderr.getvalue()) == bar
    assert ("\n" in stderr.getvalue().rstrip()) != bar


def test_it_is_off(clock, terminal):
    progress.set_mode("off")
    work(clock, 5)
    progress.set_mode("bar")
    work(clock, 5, show=False)
    with progress.off():
        with progress.off():
            work(clock, 5)
        work(clock, 5)
        thread = threading.Thread(target=work, args=[clock, 5])
        thread.start()
        thread.join()
    assert not terminal.getvalue()
    work(clock, 5)
    assert terminal.getvalue()


def test_off_ends_with_an_error(clock, terminal):
    with pytest.raises(KeyError), progress.off():
        raise KeyError
    work(clock, 5)
    assert terminal.getvalue()


def test_an_unknown_mode():
    with pytest.raises(ValueError, match=r"'auto', 'bar', .* got 'loud'"):
        progress.set_mode("loud")
    assert progress._mode == "auto"


def test_the_environment_has_the_first_mode(monkeypatch):
    def mode():
        spec = importlib.util.find_spec(progress.__name__)
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
        return again._mode

    monkeypatch.setenv("TFRS_EMBED_PROGRESS", "LOG")
    assert mode() == "log"
    monkeypatch.setenv("TFRS_EMBED_PROGRESS", "loud")
    with pytest.raises(ValueError, match="TFRS_EMBED_PROGRESS must"):
        mode()


def test_an_error_ends_the_bar(clock, terminal):
    with pytest.raises(KeyError), Task("Saving", "tables", 100) as task:
        clock.now += 5
        task.advance(30)
        raise KeyError
    assert terminal.getvalue().endswith("\n")
    assert "30%" in terminal.states[-2] and "100%" not in terminal.getvalue()
    assert "stopped, 30 B in 0:00:05" in terminal.states[-1]


def test_an_error_ends_the_lines(clock, stderr):
    with pytest.raises(KeyError), Task("Saving", "tables", 100) as task:
        clock.now += 5
        task.advance(30)
        raise KeyError
    assert stderr.states[-1] == "Saving tables: stopped, 30 B in 0:00:05"


def test_off_hides_the_parts_of_a_task_that_is_shown(clock, stderr):
    with Task("Converting", "a file", 8) as task, progress.off():
        work(clock, 4)
        task.advance(8)
    assert "Converting a file: done" in stderr.getvalue()
    assert "Saving" not in stderr.getvalue()


def test_threads_count_together(clock, terminal):
    with Task("Saving", "tables", 80_000) as task:
        clock.now += 10

        def count():
            for _ in range(10_000):
                task.advance()

        threads = [threading.Thread(target=count) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert task.done == 80_000


class Broken(Stderr):
    terminal = True

    def write(self, text):
        raise BrokenPipeError


class Unready(Stderr):
    def isatty(self):
        raise OSError


@pytest.mark.parametrize("mode", ["auto", "bar", "log"])
@pytest.mark.parametrize("kind", ["closed", "broken", "unready", "none"])
def test_a_stderr_that_fails_fails_nothing(
    clock, monkeypatch, capsys, mode, kind
):
    found = {"broken": Broken, "unready": Unready, "none": lambda: None}.get(
        kind, Stderr
    )()
    if kind == "closed":
        found.terminal = True
        found.close()
    replace(monkeypatch, found)
    progress.set_mode(mode)
    assert work(clock, 50).done == 500 * MB
    assert not capsys.readouterr().out


def test_a_stderr_that_is_closed_meanwhile(clock, terminal, monkeypatch):
    with Task("Saving", "tables", 100) as task:
        clock.now += 5
        task.advance(30)
        terminal.close()
        clock.now += 5
        task.advance(30)
    fresh = Stderr()
    fresh.terminal = True
    replace(monkeypatch, fresh)
    work(clock, 5)
    assert "done" in fresh.states[-1]


def test_an_interrupt_is_not_swallowed(clock, monkeypatch):
    class Interrupted(Stderr):
        def write(self, text):
            raise KeyboardInterrupt

    replace(monkeypatch, Interrupted())
    with pytest.raises(KeyboardInterrupt), Task("Saving", "x", 9) as task:
        clock.now += 5
        task.advance()


def test_a_cluster_has_no_bars(clock, terminal, monkeypatch):
    service = types.SimpleNamespace(_collective_ops_server_def="a cluster's")
    monkeypatch.setattr(progress.context, "context", lambda: service)
    work(clock, 5)
    assert "|" not in terminal.getvalue()
    assert "\n" in terminal.getvalue().rstrip()


def test_it_starts_no_thread(clock, terminal):
    before = set(threading.enumerate())
    with Task("Saving", "tables", 100) as task:
        clock.now += 5
        task.advance(30)
        assert set(threading.enumerate()) == before


# What uses it, shown at once.

ROWS, DIM = 1000, 4
NBYTES = ROWS * DIM * 4


@pytest.fixture
def tasks(monkeypatch):
    """The tasks that end: their labels, what was done, and what was to do."""
    monkeypatch.setattr(progress, "_AFTER_S", 0)
    monkeypatch.setattr(progress, "_BAR_EVERY_S", 0)
    found = []
    leave = Task.__exit__

    def end(task, *error):
        found.append((task.label, task.done, task.total))
        leave(task, *error)

    monkeypatch.setattr(Task, "__exit__", end)
    return found


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", ROWS * DIM // 4)
    monkeypatch.setattr(bundle, "BLOCK_BYTES", NBYTES // 4)
    monkeypatch.setattr(bundle, "PART_BYTES", NBYTES // 4)


def make_layer(optimizer="adagrad", name="ranking", **options):
    table = tfrs_embed.TableConfig("movies", ROWS, DIM, **options)
    return layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("movie", table),
        optimizer,
        size_threshold=1,
        name=name,
    )


def shares(stderr):
    """The shares of what is done that bars showed."""
    return [int(s) for s in re.findall(r"\| (\d+)% of", stderr.getvalue())]


def test_a_layer_is_built(tasks, small_blocks, terminal):
    make_layer()(tf.constant([1]))
    assert tasks == [
        ("Building table 'movies'", NBYTES, NBYTES),
    ]
    assert shares(terminal)[-1] == 100
    assert {25, 50, 75} <= set(shares(terminal))
    # They are one bar.
    assert terminal.getvalue().count("\n") == 1


@pytest.mark.usefixtures("needs_kernels")
def test_files_are_filled(tasks, small_blocks, terminal, tmp_path):
    layer = make_layer(storage=tfrs_embed.FileStorage(tmp_path))
    layer(tf.constant([1]))
    [slot] = tmp_path.glob("movies/*/accumulators")
    assert tasks == [
        (f"Filling '{slot}'", NBYTES, NBYTES),
        ("Building table 'movies'", NBYTES, NBYTES),
    ]
    assert {25, 50, 75} <= set(shares(terminal))


def test_a_checkpoint_is_saved_and_restored(
    tasks, small_blocks, terminal, tmp_path
):
    layer = make_layer()
    layer(tf.constant([1]))
    checkpoint = tf.train.Checkpoint(layer=layer)
    tasks.clear()
    path = checkpoint.save(str(tmp_path / "c"))
    # The table and its slot; besides what tells how they are trained.
    [(label, done, total)] = tasks
    assert label == "Saving tables of 'c-1'"
    assert total == done
    assert 2 * NBYTES <= done <= 2 * NBYTES + 16
    assert {25, 50, 75, 100} <= set(shares(terminal))
    tasks.clear()
    checkpoint.restore(path).assert_existing_objects_matched()
    [(label, done, total)] = tasks
    assert label == "Restoring tables of 'c-1'"
    assert 2 * NBYTES <= done <= 2 * NBYTES + 16
    assert total - done in range(-16, 17)
    assert len(shares(terminal)) >= 16
    assert terminal.getvalue().endswith("\n")


def test_a_restore_that_waits_is_shown_as_the_layer_is_built(
    tasks, small_blocks, terminal, tmp_path
):
    layer = make_layer()
    layer(tf.constant([1]))
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "c"))
    other = make_layer()
    status = tf.train.Checkpoint(layer=other).restore(path)
    tasks.clear()
    other(tf.constant([1]))
    status.assert_existing_objects_matched()
    labels = [label for label, _, _ in tasks]
    assert "Building table 'movies'" in labels
    assert "Restoring tables of 'c-1'" in labels
    for label, done, total in tasks:
        assert abs(done - total) <= 16, label


def test_a_save_survives_a_stderr_that_is_closed(
    tasks, small_blocks, terminal, tmp_path
):
    layer = make_layer()
    layer(tf.constant([1]))
    terminal.close()
    checkpoint = tf.train.Checkpoint(layer=layer)
    path = checkpoint.save(str(tmp_path / "c"))
    checkpoint.restore(path).assert_existing_objects_matched()


def test_tables_of_keys_are_saved_and_restored(tasks, terminal, tmp_path):
    layer = layers.DynamicEmbedding(DIM, list(range(0, 3500, 7)))
    layer(tf.constant([7], tf.int64))
    checkpoint = tf.train.Checkpoint(layer=layer)
    tasks.clear()
    path = checkpoint.save(str(tmp_path / "c"))
    [(label, done, total)] = tasks
    assert label == "Saving tables of 'c-1'"
    # Keys, rows and slots.
    assert done >= 500 * (8 + 2 * DIM * 4)
    assert abs(total - done) <= 16
    tasks.clear()
    checkpoint.restore(path).assert_existing_objects_matched()
    [(label, done, total)] = tasks
    assert label == "Restoring tables of 'c-1'"
    assert done >= 500 * (8 + 2 * DIM * 4)
    assert abs(total - done) <= 16


def test_a_model_is_exported(tasks, small_blocks, terminal, tmp_path):
    layer = make_layer()
    movie = keras.Input([], dtype=tf.int64, name="movie")
    model = keras.Model(movie, layer(movie))
    model(tf.constant([1], tf.int64))
    tasks.clear()
    tfrs_embed.serving.export(model, str(tmp_path / "model" / "1"))
    assert tasks == [("Exporting tables of 'model/1'", NBYTES, NBYTES)]
    assert shares(terminal)[-1] == 100
    assert len(set(shares(terminal))) >= 4
    terminal.truncate(0)
    tfrs_embed.serving.export(model, tmp_path / "quiet", progress=False)
    assert not terminal.getvalue().strip("\0")


def test_a_checkpoint_is_converted(tasks, small_blocks, terminal, tmp_path):
    layer = make_layer()
    layer(tf.constant([1]))
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "c"))
    terminal.truncate(0)
    tasks.clear()
    assert main(["convert", path, str(tmp_path / "new")]) == 0
    label, done, total = tasks[-1]
    assert label == "Converting 'c-1'"
    assert done == total == 2 * NBYTES
    assert shares(terminal)[-1] == 100
    assert "Saving" not in terminal.getvalue()


def test_batches_are_read(tasks, terminal):
    def features(hot_rows=()):
        table = tfrs_embed.TableConfig("movies", ROWS, DIM, hot_rows=hot_rows)
        return tfrs_embed.FeatureConfig("movie", table)

    batches = [np.arange(8) + i for i in range(40)]
    calls = [
        lambda **options: tfrs_embed.sparsecore.compute_limits(
            batches, features(), (1, 2), "sgd", **options
        ),
        lambda **options: tfrs_embed.hot_rows(
            features(2), tf.data.Dataset.from_tensor_slices(batches), **options
        ),
        lambda **options: tfrs_embed.plan(
            features(), batches, replicas=2, optimizer="sgd", **options
        ),
    ]
    for call, what, number in zip(
        calls, ["limits", "hot rows", "a plan"], [40, 40, 32], strict=True
    ):
        call()
        assert tasks.pop() == (f"Reading batches for {what}", number, number)
        assert f"done, {number} batches" in terminal.states[-1]
        terminal.truncate(0)
        call(progress=False)
        assert not terminal.getvalue().strip("\0")


def test_small_models_show_nothing(small_blocks, terminal, tmp_path):
    layer = make_layer()
    layer(tf.constant([1]))
    checkpoint = tf.train.Checkpoint(layer=layer)
    checkpoint.restore(checkpoint.save(str(tmp_path / "c")))
    assert not terminal.getvalue()
    assert os.listdir(tmp_path)

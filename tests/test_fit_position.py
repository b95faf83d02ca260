"""A `fit` that was killed goes on with the next batch."""

import pathlib
import random

import numpy as np
import pytest
import tensorflow as tf

import killed_fit
from forked_scripts import ForkServer
from keras_under_test import NUMBER, keras, only_keras_2, only_keras_3
from killed_fit import EPOCHS, KINDS, SAMPLES, After, make, result, train
from nightly_flag import ALL
from process_tiers import nightly, on
from run_in_processes import TESTS, environment
from tfrs_embed.checkpoint import FitPosition, SaveCallback

pytestmark = [pytest.mark.more, on("keras:3", tier="nightly")]

#: The kinds of input whose processes are killed in each run of CI.
BY_DAY = ("shuffled, four steps at once",)


class Stop(Exception):
    pass


def stop():
    raise Stop


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Results of training without a kill."""
    found = {}

    def of(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp("undisturbed")
            found[kind] = result(train(kind, folder)[0])
        return found[kind]

    return of


def check(found, wanted):
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, name)


@on(
    "keras:3",
    tier="more",
    when=lambda kind: kind == "a stream",
)
@nightly(
    lambda kind, steps: (
        steps == 14
        or kind
        in (
            "repeated",
            "shuffled",
            "not shuffled",
            "shuffled, four steps at once",
        )
    )
)
@pytest.mark.parametrize("steps", [5, 14])
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_with_the_next_batch(kind, steps, undisturbed, tmp_path):
    executions = -(-steps // KINDS[kind])
    with pytest.raises(Stop):
        train(kind, tmp_path, After(executions, stop))
    model, position = train(kind, tmp_path)
    check(result(model), undisturbed(kind))
    assert (position.epoch, position.step) == (EPOCHS, 0)


@on("keras:3", tier="more")
def test_each_sample_is_seen_once_in_each_epoch(undisturbed):
    seen = undisturbed("shuffled")["seen"]
    steps = -(-SAMPLES // killed_fit.BATCH)
    epochs = [seen[i * steps : (i + 1) * steps] for i in range(EPOCHS)]
    assert [e.sum(0).tolist() for e in epochs] == [[1] * SAMPLES] * EPOCHS
    # In another order each time.
    assert not np.array_equal(epochs[0], epochs[1])


@pytest.fixture(scope="module")
def server():
    modules = ("tensorflow", keras.__name__, "tfrs_embed")
    env = {**environment(""), "TFRS_EMBED_TEST_KERAS": str(NUMBER)}
    with ForkServer(modules, env) as started:
        yield started


def kill_and_go_on(server, kind, folder, kills):
    job = str(TESTS / "killed_fit.py")
    for kill in (*kills, 0):
        log = pathlib.Path(folder, "log")
        fork = server.start([job, kind, str(folder), str(kill)], {}, log)
        code = fork.wait(120)
        if (pathlib.Path(folder) / "result.npz").exists():
            break
        assert code == -9, log.read_text()[-3000:]


def check_kills(server, kind, folder, kills):
    for name, each in (("killed", kills), ("undisturbed", [])):
        (folder / name).mkdir()
        kill_and_go_on(server, kind, folder / name, each)
    check(
        *(
            np.load(folder / name / "result.npz")
            for name in ("killed", "undisturbed")
        )
    )


def test_killed_processes_end_as_if_they_were_not(server, tmp_path):
    check_kills(server, "of unknown length", tmp_path, [11, 7])


@on("keras:3", tier="more")
@nightly(lambda kind: kind not in BY_DAY)
@pytest.mark.parametrize("kind", KINDS)
def test_many_kills(kind, server, tmp_path):
    kills = random.Random(kind).choices(range(1, 16), k=20 if ALL else 6)
    check_kills(server, kind, tmp_path, kills)


def test_a_fit_that_has_ended_is_not_repeated(tmp_path):
    first, _ = train("shuffled", tmp_path)
    again, position = train("shuffled", tmp_path)
    check(result(again), result(first))
    # With more epochs it goes on.
    _, position = train("shuffled", tmp_path, epochs=EPOCHS + 1)
    assert position.epoch == EPOCHS + 1


@on("keras:3", tier="more")
def test_another_fit_of_the_process_begins_anew(tmp_path):
    model, position, manager = make("shuffled", tmp_path)
    save = SaveCallback(manager, position, every_steps=5)
    for _ in range(2):
        count = After(0, stop)
        data = killed_fit.dataset("shuffled")
        model.fit(data, epochs=1, callbacks=[count, save], verbose=0)
        assert count.left == -13
        assert position.epoch == 1


@on("keras:3", tier="more")
def test_a_restore_in_the_same_process(undisturbed, tmp_path):
    model, position, manager = make("shuffled", tmp_path)
    save = SaveCallback(manager, position, every_steps=2)
    data = killed_fit.dataset("shuffled")
    arguments = {"epochs": EPOCHS, "verbose": 0}
    with pytest.raises(Stop):
        model.fit(data, callbacks=[After(18, stop), save], **arguments)
    manager.restore_or_initialize()
    model.fit(data, callbacks=[save], **arguments)
    check(result(model), undisturbed("shuffled"))


def test_training_that_was_stopped_goes_on_within_the_epoch(
    undisturbed, tmp_path
):
    def stop_training():
        end.model.stop_training = True

    end = After(18, stop_training)
    _, position = train("shuffled", tmp_path, end, every_steps=1000)
    assert (position.epoch, position.step) == (1, 5)
    model, _ = train("shuffled", tmp_path)
    check(result(model), undisturbed("shuffled"))


@pytest.mark.parametrize("shuffle", [True, False])
def test_arrays(shuffle, tmp_path):
    ids = np.arange(SAMPLES)
    arguments = {
        "data": ids,
        "y": ids.astype(np.float32),
        "batch_size": 3,
        "shuffle": shuffle,
        "epochs": 1,
    }
    with pytest.raises(Stop):
        train("shuffled", tmp_path, After(5, stop), **arguments)
    model, _ = train("shuffled", tmp_path, **arguments)
    assert model.seen.numpy().sum(0).tolist() == [1] * SAMPLES


def generator():
    yield np.zeros([2], np.int64), np.zeros([2], np.float32)


def random_map():
    data = killed_fit.dataset("shuffled")
    return data.map(lambda i, y: (i, y + tf.random.uniform([])))


@on("keras:3", tier="more")
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (generator, "PyFunc is stateful"),
        (random_map, "RandomUniform is stateful"),
    ],
)
def test_an_input_that_cannot_be_saved_is_an_error(data, words, tmp_path):
    with pytest.raises(ValueError, match=words) as raised:
        train("shuffled", tmp_path, data=data())
    assert "SaveCallback(manager)" in str(raised.value)
    # The callback leaves nothing behind, and trains without a position.
    model, position, manager = make("shuffled", tmp_path)
    with pytest.raises(ValueError, match=words):
        model.fit(
            data(), callbacks=[SaveCallback(manager, position)], verbose=0
        )
    model.fit(data(), callbacks=[SaveCallback(manager)], verbose=0)
    assert manager.latest_checkpoint.endswith("ckpt-1")
    assert position.epoch == 0


@on("keras:3", tier="more")
def test_a_distributed_input_is_an_error(tmp_path):
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    position = FitPosition()
    checkpoint = tf.train.Checkpoint(model=model, position=position)
    manager = tf.train.CheckpointManager(checkpoint, tmp_path, 1)
    data = tf.data.Dataset.from_tensors((tf.zeros([2, 3]), tf.zeros([2, 1])))
    with pytest.raises(ValueError, match="a strategy distributes it"):
        model.fit(data, callbacks=[SaveCallback(manager, position)], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 0


@on("keras:3", tier="more")
def test_the_input_of_another_dataset_is_an_error(tmp_path):
    with pytest.raises(Stop):
        train("shuffled", tmp_path, After(5, stop))
    other = killed_fit.dataset("not shuffled").batch(1).unbatch().take(13)
    with pytest.raises(ValueError, match="is of another dataset"):
        train("shuffled", tmp_path, data=other, steps_per_epoch=13)
    with pytest.raises(ValueError, match="step 4 of an epoch; here an epoch"):
        train("shuffled", tmp_path, steps_per_epoch=3)


@on("keras:3", tier="more")
@only_keras_3("tf_keras begins at any step")
def test_other_steps_per_execution_are_an_error(tmp_path, monkeypatch):
    with pytest.raises(Stop):
        train("shuffled", tmp_path, After(5, stop))
    monkeypatch.setitem(KINDS, "shuffled", 3)
    with pytest.raises(ValueError, match="the steps_per_execution that"):
        train("shuffled", tmp_path)


@only_keras_2("it skips steps")
def test_other_steps_per_execution(undisturbed, tmp_path, monkeypatch):
    wanted = undisturbed("shuffled")
    with pytest.raises(Stop):
        train("shuffled", tmp_path, After(5, stop))
    monkeypatch.setitem(KINDS, "shuffled", 3)
    check(result(train("shuffled", tmp_path)[0]), wanted)


@on("keras:3", tier="more")
@only_keras_3("tf_keras restores models that are built later")
def test_a_model_that_was_not_built_is_an_error(tmp_path):
    with pytest.raises(Stop):
        train("shuffled", tmp_path, After(5, stop))
    with pytest.raises(ValueError, match="was not built before"):
        train("shuffled", tmp_path, build=False)


class Manager:
    def __init__(self):
        self.saved = 0

    def save(self):
        self.saved += 1


@on("keras:3", tier="more")
@pytest.mark.parametrize(
    ("arguments", "saved"),
    [
        ({}, EPOCHS),
        ({"every_steps": 4}, 9 + 1),
    ],
)
def test_when_it_saves(arguments, saved, tmp_path):
    model, _, _ = make("shuffled", tmp_path)
    manager = Manager()
    model.fit(
        killed_fit.dataset("shuffled"),
        epochs=EPOCHS,
        callbacks=[SaveCallback(manager, **arguments)],
        verbose=0,
    )
    assert manager.saved == saved


@on("keras:3", tier="more")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"manager": "folder"}, TypeError, r"a method save\(\), got 'folder'"),
        ({"position": 3}, TypeError, "must be a FitPosition, got 3"),
        ({"position": FitPosition()}, ValueError, "doesn't contain the pos"),
        ({"every_steps": 0}, ValueError, "every_steps must be an integer >= 1"),
    ],
)
def test_wrong_arguments(arguments, error, words, tmp_path):
    checkpoint = tf.train.Checkpoint()
    manager = tf.train.CheckpointManager(checkpoint, tmp_path, 1)
    with pytest.raises(error, match=words):
        SaveCallback(**{"manager": manager, **arguments})


@on("keras:3", tier="more")
def test_a_checkpoint_without_a_position(tmp_path):
    model, _, _ = make("shuffled", tmp_path)
    model(tf.constant([1]))
    path = tf.train.Checkpoint(model=model).save(f"{tmp_path}/old")
    model, position, manager = make("shuffled", tmp_path)
    manager.checkpoint.restore(path)
    assert (position.epoch, position.step) == (0, 0)


@on("keras:3", tier="more")
def test_asynchronous_checkpoints_are_an_error(tmp_path):
    checkpoint = tf.train.Checkpoint(position=FitPosition())
    options = tf.train.CheckpointOptions(
        experimental_enable_async_checkpoint=True
    )
    with pytest.raises(ValueError, match="enable_async_checkpoint"):
        checkpoint.save(f"{tmp_path}/c", options)


@on("keras:3", tier="more")
def test_an_iterator_of_a_custom_loop(tmp_path):
    def begin():
        iterator = iter(killed_fit.dataset("shuffled"))
        return iterator, tf.train.Checkpoint(iterator=iterator)

    iterator, checkpoint = begin()
    for _ in range(4):
        next(iterator)
    path = checkpoint.save(f"{tmp_path}/c")
    wanted = [ids.numpy().tolist() for ids, _ in iterator]
    iterator, checkpoint = begin()
    checkpoint.restore(path)
    assert [ids.numpy().tolist() for ids, _ in iterator] == wanted

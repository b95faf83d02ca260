"""What tests share: random ids of every kind, training, a layer's state."""

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from reference import Ragged, Sparse

#: Each kind of ids, and the options of a feature that takes them.
KINDS = {
    "scalar": lambda batch: {},
    "dense": lambda batch: {},
    "matrix": lambda batch: {},
    "combined": lambda batch: {"output_shape": (batch,)},
    "combined_cube": lambda batch: {"output_shape": (batch, 2)},
    "ragged": lambda batch: {},
    "sparse": lambda batch: {},
    "ragged_sequence": lambda batch: {"max_sequence_length": 3},
    "sparse_sequence": lambda batch: {"max_sequence_length": 3},
    "ragged_shaped": lambda batch: {"output_shape": (batch,)},
    "ragged_positions": lambda batch: {"output_shape": (batch, 4)},
}

_DENSE_SHAPES = {
    "scalar": lambda batch: (),
    "dense": lambda batch: (batch,),
    "matrix": lambda batch: (batch, 4),
    "combined": lambda batch: (batch, 4),
    "combined_cube": lambda batch: (batch, 2, 3),
}


def make_ids(rng, kind, batch, rows, low=0):
    """Random ids in [low, rows): duplicates and empty rows included."""

    def draw(*size):
        return rng.integers(low, rows, size)

    if kind in _DENSE_SHAPES:
        shape = _DENSE_SHAPES[kind](batch)
        dtype = np.int32 if kind == "matrix" else np.int64
        return np.asarray(draw(*shape), dtype)
    lengths = rng.integers(0, 6, batch)
    lengths[rng.integers(batch)] = 0
    if kind.startswith("ragged"):
        return Ragged([draw(n).tolist() for n in lengths])
    cells = {}
    for row, length in enumerate(lengths):
        for column in rng.choice(6, size=length, replace=False):
            cells[row, int(column)] = int(draw())
    return Sparse(cells, (batch, 6))


def make_weights(rng, ids):
    """Random weights for ids: some negative, some zero."""

    def draw(*size):
        values = rng.uniform(-0.5, 2.0, size)
        return np.where(rng.random(size) < 0.1, 0.0, values)

    if isinstance(ids, np.ndarray):
        return np.asarray(draw(*ids.shape), np.float32)
    if isinstance(ids, Ragged):
        rows = [draw(len(row)).tolist() for row in ids.rows]
        return Ragged(rows, "float32")
    cells = {key: float(draw()) for key in ids.cells}
    return Sparse(cells, ids.shape, "float32")


def differentiate(tape, loss, variables):
    """Takes gradients, and uses them: a function leaves out updates else."""
    gradients = tape.gradient(loss, variables)
    flat = tf.nest.flatten(gradients, expand_composites=True)
    return [tf.identity(g) for g in flat if g is not None]


def train(layer, inputs, gradients, weights=None):
    """Trains a layer once, with these gradients of its activations."""
    with tf.GradientTape() as tape:
        outputs = layer(inputs, weights=weights, training=True)
        products = [
            tf.reduce_sum(output * gradient)
            for output, gradient in zip(
                tf.nest.flatten(outputs),
                tf.nest.flatten(gradients),
                strict=True,
            )
        ]
        loss = tf.add_n(products)
    differentiate(tape, loss, layer.trainable_variables)


def state(layer):
    """Copies of all that training may change: tables, slots, the step."""
    copies = {
        f"{table}/{name}": variable.numpy()
        for table in layer.embedding_tables
        for name, variable in layer.tables[table].variables.items()
    }
    if layer.step is not None:
        copies["step"] = layer.step.numpy()
    return copies


def assert_unchanged(layer, before):
    """Asserts that a layer's state is what it was, bit for bit."""
    after = state(layer)
    assert list(after) == list(before)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def change_byte(path, at):
    """Changes a byte of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def operations_run(function, *args):
    """The kinds of operations that the first call of a function runs."""
    context.enable_run_metadata()
    try:
        context.export_run_metadata()  # What ran before.
        function(*args)
        metadata = context.export_run_metadata()
    finally:
        context.disable_run_metadata()
    return {
        node.op
        for function in metadata.function_graphs
        for graph in function.partition_graphs
        for node in graph.node
    }

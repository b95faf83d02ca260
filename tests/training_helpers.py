"""What tests share: training, a layer's state, what operations ran."""

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import tfrs_embed_command
from tfrs_embed.compat.strategies import require_sparse_core_api

#: Whether tests run on a GPU. It adds numbers up in any order, so the last bits
#: of equal sums differ.
ON_GPU = bool(tf.config.list_physical_devices("GPU"))


def sparse_core_config(**settings):
    """A SparseCoreEmbeddingConfig; an error where TensorFlow has none."""
    require_sparse_core_api()
    return tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(**settings)


def checkpoint_command(arguments):
    """Runs `tfrs-embed checkpoint`; returns the exit status."""
    return tfrs_embed_command.main(["checkpoint", *arguments])


def differentiate(tape, loss, variables, values=()):
    """Takes gradients, and uses them: a function leaves out updates else.

    Returns the gradients' tensors, or the gradients of `values`, tensors that
    the tape watches too.
    """
    gradients, of_values = tape.gradient(loss, [variables, [*values]])
    flat = tf.nest.flatten(gradients, expand_composites=True)
    found = [tf.identity(g) for g in flat if g is not None]
    return [*map(tf.convert_to_tensor, of_values)] if values else found


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


def small_model(keras, layer, features):
    """A functional model over a layer's features, and a batch to fit it to."""
    ids = {n: keras.Input([], dtype="int64", name=n) for n in features}
    outputs = keras.layers.Concatenate()(list(layer(ids).values()))
    model = keras.Model(ids, keras.layers.Dense(1)(outputs))
    batch = {n: tf.constant([3, 7]) for n in features}
    return model, tf.data.Dataset.from_tensors((batch, tf.ones([2, 1])))


def tables_of(layer):
    """Copies of a layer's tables, by name."""
    return {k: table.numpy() for k, table in layer.embedding_tables.items()}


def state(layer):
    """Copies of all that training may change: tables, slots, the step.

    All2AllDenseEmbedding has one table, whose variables go by their own names.
    """
    if not hasattr(layer, "table_optimizer"):
        copies = {
            f"{table}/{name}": variable.numpy()
            for table in layer.embedding_tables
            for name, variable in layer.tables[table].variables.items()
        }
    else:
        copies = {k: v.numpy() for k, v in layer.table.variables.items()}
    if layer.step is not None:
        copies["step"] = layer.step.numpy()
    return copies


def assert_same(found, expected):
    """Asserts that two states are equal, bit for bit."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_trained_alike(found, expected):
    """Asserts that two states, after equal steps, are equal.

    Bit for bit; on a GPU but for the last bits.
    """
    if not ON_GPU:
        assert_same(found, expected)
        return
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-5, atol=1e-7, err_msg=name
        )


def assert_unchanged(layer, before):
    """Asserts that a layer's state is what it was, bit for bit."""
    assert_same(state(layer), before)


def save_tensors(prefix, tensors):
    """Writes a checkpoint of tensors by name, without objects."""
    values = [tf.constant(value) for value in tensors.values()]
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(values),
        tensors=values,
    )
    return str(prefix)


def files_in(folder):
    """The contents of a folder's files, by their paths in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def change_byte(path, at):
    """Changes a byte of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def mappings_of(path):
    """This process's mappings of a file, or of files in a folder.

    Of each what Linux says in /proc/self/smaps: kB by name, and "VmFlags".
    """
    found = []
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            name, value = line.split(maxsplit=1)
            if not name.endswith(":"):  # The next mapping, and its file.
                here = {}
                if str(path) in value:
                    found.append(here)
            elif name == "VmFlags:":
                here["VmFlags"] = value.split()
            elif value.endswith("kB\n"):
                here[name[:-1]] = int(value.split()[0])
    return found


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

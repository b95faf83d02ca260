"""Prints what the library changes in TensorFlow and Keras, as JSON.

`test_private_api.py` runs it, in a process for each Keras, and compares.
"""

import inspect
import json
import sys

import tensorflow as tf

PACKAGES = ("tensorflow", "keras", "tf_keras")


def attributes():
    """All that modules, classes and TensorFlow's context have, by path.

    Their values are kept, so that no other one can have the same id.
    """
    from tensorflow.python.eager import context

    found = {"context": vars(context.context()).copy()}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES or not inspect.ismodule(
            module
        ):
            continue
        found[name] = vars(module).copy()
        for key, value in found[name].items():
            if inspect.isclass(value) and value.__module__ == name:
                found[f"{name}.{key}"] = dict(vars(value))
    return found


def entries():
    """The entries of the registries among them, by path."""
    from tensorflow.python.framework import registry

    found = {}
    for owner, values in attributes().items():
        for key, value in values.items():
            if isinstance(value, registry.Registry):
                value = [e["type"] for e in value._registry.values()]
            if isinstance(value, dict | list | set):
                found[f"{owner}.{key}"] = {
                    f"{getattr(each, '__module__', '')} {each}"
                    for each in value
                }
    return found


def is_code(value):
    """Whether a value is what programs call, and no counter or cache."""
    return callable(value) or inspect.isdatadescriptor(value)


def changed(before):
    """The paths of other values than before; lazily loaded ones are none."""
    now = attributes()
    return {
        f"{owner}.{key}"
        for owner, values in before.items()
        for key in values.keys() | now[owner].keys()
        if values.get(key) is not now[owner].get(key)
        and (is_code(values.get(key)) or is_code(now[owner].get(key)))
    }


def added(before):
    """The registries with entries of this library."""
    return sorted(
        path
        for path, now in entries().items()
        if any("tfrs_embed" in e for e in now - before.get(path, set()))
    )


def train(keras, layers, strategy, make):
    """A step of a model, and a batch that it predicts."""
    with strategy.scope():
        inputs = keras.Input([], dtype="int64")
        model = keras.Model(inputs, keras.layers.Dense(1)(make()(inputs)))
        model.compile(keras.optimizers.Adam(0.1), "mse")
    data = tf.data.Dataset.from_tensors((tf.range(4), tf.ones([4, 1])))
    replicas = isinstance(strategy, tf.distribute.MirroredStrategy)
    if layers is None or keras.__name__ == "tf_keras" or not replicas:
        model.fit(data, verbose=0)
    else:
        layers.fit(model, data, strategy, verbose=0)
        layers.evaluate(model, data, strategy, verbose=0)
    model.predict(tf.range(4), verbose=0)


def main(name):
    cpus = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpus[0], two)
    keras = __import__(name)
    hooks = list(sys.meta_path)
    strategies = [
        tf.distribute.get_strategy(),
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    ]
    for strategy in strategies:  # What they load and replace by themselves.
        train(keras, None, strategy, lambda: keras.layers.Embedding(100, 4))
    before, registered = attributes(), entries()

    import tfrs_embed

    # wrapt has the only one, which calls the library when a Keras is imported.
    more = [hook for hook in sys.meta_path if hook not in hooks]
    assert {type(hook).__module__ for hook in more} <= {"wrapt.importer"}
    imported = changed(before)
    layers = tfrs_embed if name == "tf_keras" else tfrs_embed.keras3

    def make():
        feature = tfrs_embed.FeatureConfig(
            "f", tfrs_embed.TableConfig("t", 100, 4)
        )
        return layers.PartialTPUEmbedding(feature, "sgd", size_threshold=9)

    for strategy in strategies:
        train(keras, layers, strategy, make)
        train(keras, layers, strategy, lambda: layers.Embedding(100, 4))
    trained = changed(before)
    from tfrs_embed.sparsecore import pipelining

    pipelining.retrace_in_loops()
    tfrs_embed.set_heartbeat_timeout(60)
    found = sorted(imported), sorted(trained), sorted(changed(before))
    print("CHANGED", json.dumps([*found, added(registered)]))


if __name__ == "__main__":
    main(sys.argv[1])

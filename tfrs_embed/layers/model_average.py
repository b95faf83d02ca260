"""Moving averages of whole models: dense variables and tables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.arguments import integer, share
from tfrs_embed.storage import moving_average


def assign_moving_average(average: Any, model: Any, rate: float) -> None:
    """Moves all variables and tables of a model towards those of another.

    Each variable that is trainable in `model`, and each row of all tables,
    becomes rate * value + (1 - rate) * the other model's value; other
    variables, such as the statistics of batch normalization, get the other's
    values. It calls `assign_moving_average` of the layers with tables, which
    reads and writes tables whole, in blocks. Call it eagerly, between steps;
    with several workers, on all of them.

    Example:
        >>> def make():
        ...     table = tfrs_embed.TableConfig("movie", 20_000, 8)
        ...     layer = tfrs_embed.PartialTPUEmbedding(
        ...         tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ...     )
        ...     start = tf_keras.Input([], dtype="int64")
        ...     dense = tf_keras.layers.Dense(1)
        ...     return tf_keras.Sequential([start, layer, dense])
        >>> model, target = make(), make()
        >>> tfrs_embed.assign_moving_average(target, model, rate=0.0)  # A copy.
        >>> ids = tf.constant([3, 7])
        >>> np.testing.assert_array_equal(target(ids), model(ids))

    Args:
        average: the model that is changed, of tf_keras or Keras 3.
        model: a model of the same layers.
        rate: the share of the average's own values, in [0, 1].

    Raises:
        TypeError: the rate is not a number, or an argument is no model.
        ValueError: it is not in [0, 1]; both are one model; variables or tables
            differ, or aren't made yet. Then nothing has changed.
    """
    rate = share(rate, "assign_moving_average: rate")
    layers, variables = _pairs(average, model)
    for mine, other in layers:
        mine.assign_moving_average(other, rate)
    for mine, other in variables:
        before, given = (
            tf.convert_to_tensor(keras_versions.variable(each))
            for each in (mine, other)
        )
        # The average may be frozen, which Keras 3's variables say.
        if other.trainable:
            given = moving_average.blend(before, given, rate)
        mine.assign(given)


class MovingAverageCallback(keras_versions.PlainCallback):
    """A callback of tf_keras or Keras 3 that keeps a model's moving average.

    Every `every_steps` steps it calls `assign_moving_average`, which reads and
    writes tables whole: in a step with large tables that is most of the time,
    so choose a larger `every_steps`, and a smaller `rate` to match. With
    `steps_per_execution` it comes after as many steps at the earliest. Start
    with a copy, by `rate=0.0` of `assign_moving_average`. With several workers
    all must have the callback.

    Example:
        >>> model, average = (
        ...     tf_keras.Sequential([tf_keras.layers.Dense(1)])
        ...     for _ in range(2)
        ... )
        >>> for each in (model, average):
        ...     each.build([None, 3])
        >>> tfrs_embed.assign_moving_average(average, model, rate=0.0)
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(
        ...     tf.ones([4, 3]),
        ...     tf.ones([4]),
        ...     callbacks=[tfrs_embed.MovingAverageCallback(average, 0.99)],
        ...     verbose=0,
        ... )

    Args:
        average: the model that is the average, of the layers of the model that
            is trained.
        rate: the share of the average's own values at each update, in [0, 1].
        every_steps: the number of steps between two updates.

    Raises:
        TypeError: the rate is not a number.
        ValueError: it is not in [0, 1], or `every_steps` is no integer of at
            least 1.
    """

    def __init__(self, average: Any, rate: float, every_steps: int = 1) -> None:
        self._average = average
        self._rate = share(rate, "MovingAverageCallback: rate")
        self._every = integer(every_steps, "MovingAverageCallback: every_steps")
        self._since = self._done = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Compares the models, if the trained one has its variables.

        Raises:
            ValueError: they differ.
        """
        if self._model.built:
            _pairs(self._average, self._model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        end = self._steps_until(batch)
        self._since += end - self._done
        self._done = end
        if self._since >= self._every:
            self._since = 0
            assign_moving_average(self._average, self._model, self._rate)


_Pairs = list[tuple[Any, Any]]


def _pairs(average: Any, model: Any) -> tuple[_Pairs, _Pairs]:
    """Returns the layers of tables, and the other variables, of two models.

    Raises:
        TypeError: an argument is no model.
        ValueError: they differ, or both are one model.
    """
    for each in (average, model):
        if keras_versions.keras_of(each) is None:
            raise TypeError(f"An average is of models of Keras, got {each!r}.")
    where = f"Model '{average.name}' can't be the average of '{model.name}'"
    if average is model:
        raise ValueError(f"{where}: both are one model.")
    (layers, mine), (of_other, others) = map(_parts, (average, model))
    names = [[each.name for each in found] for found in (layers, of_other)]
    if len(layers) != len(of_other):
        raise ValueError(f"{where}: the layers of tables are {names}.")
    if len(mine) != len(others):
        raise ValueError(
            f"{where}: beside tables they have {len(mine)} and {len(others)} "
            "variables. Build both, or call them once, and give them the same "
            "layers."
        )
    for one, other in zip(layers, of_other, strict=True):
        moving_average.check(one, other)
    for one, other in zip(mine, others, strict=True):
        kinds = [(tuple(v.shape), tf.as_dtype(v.dtype)) for v in (one, other)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{where}: '{one.name}' is {kinds[0][1].name} of the shape "
                f"{kinds[0][0]}, '{other.name}' is {kinds[1][1].name} of "
                f"{kinds[1][0]}."
            )
    return (
        list(zip(layers, of_other, strict=True)),
        list(zip(mine, others, strict=True)),
    )


def _parts(model: Any) -> tuple[list[Any], list[Any]]:
    """Returns a model's layers of tables, and its other variables.

    Variables are in the order of the layers that own them, which doesn't depend
    on which layers are frozen.
    """
    layers = list({id(x): x for x in model._flatten_layers()}.values())
    holders = [x for x in layers if hasattr(x, "assign_moving_average")]
    inside = {id(x) for holder in holders for x in holder._flatten_layers()}
    seen = {id(w) for holder in holders for w in holder.weights}
    variables = []
    # A layer's own come after those of the layers in it.
    for layer in reversed(layers):
        if id(layer) not in inside:
            own = [w for w in layer.weights if id(w) not in seen]
            seen.update(map(id, own))
            variables += own
    return holders, variables

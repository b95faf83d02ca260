"""What tests under a strategy share: one replica's values among all."""

import functools
import itertools

import tensorflow as tf
from tensorflow.python.eager import context

from reference import to_tf


def distribute(strategy, values):
    """Gives each local replica its own of the values, one per replica."""
    flat = [tf.nest.flatten([v]) for v in values]

    def of_replica(context, i):
        value = flat[context.replica_id_in_sync_group][i]
        return value if tf.is_tensor(value) else to_tf(value)

    spread = [
        strategy.experimental_distribute_values_from_function(
            functools.partial(of_replica, i=i)
        )
        for i in range(len(flat[0]))
    ]
    return tf.nest.pack_sequence_as([values[0]], spread)[0]


_number = itertools.count()


def of_chief(strategy, path):
    """The path that the chief saved to, whose checkpoint has all tables."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return path
    key, service = f"tests/path/{next(_number)}", context.context()
    if strategy.cluster_resolver.task_id == 0:
        service.set_config_key_value(key, str(path))
        return path
    return type(path)(service.get_config_key_value(key))


def local_ids(strategy):
    """The replica ids of this process's replicas."""
    seen = []
    strategy.experimental_distribute_values_from_function(
        lambda context: seen.append(context.replica_id_in_sync_group) or 0.0
    )
    return seen


def local(strategy, values):
    """This process's values of a result, by replica id, as numpy has them."""
    flat = [
        strategy.experimental_local_results(v) for v in tf.nest.flatten(values)
    ]
    return {
        replica: tf.nest.pack_sequence_as(
            values, [each[i].numpy() for each in flat]
        )
        for i, replica in enumerate(local_ids(strategy))
    }


def add(sums):
    """Adds the row gradients of all replicas: {table: {id: gradient}}."""
    total = {}
    for each in sums:
        for table, rows in each.items():
            mine = total.setdefault(table, {})
            for i, gradient in rows.items():
                mine[i] = mine[i] + gradient if i in mine else gradient
    return total

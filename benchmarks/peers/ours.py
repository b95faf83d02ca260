"""This library's layer; all tables are large, unless another form says so."""

import functools
import importlib

import cases

import tfrs_embed
from peers import tf_steps
from peers.keras_of_process import keras, layers


def make(case, form, **threshold):
    tables = make_tables(case)
    features = [
        tfrs_embed.FeatureConfig(
            f"feature_{i}",
            tables[feature.table],
            # Makes dense ids bags.
            output_shape=(
                [case.batch, tables[feature.table].embedding_dim]
                if form == "dense" and feature.hotness > 1
                else None
            ),
        )
        for i, feature in enumerate(case.features)
    ]
    layer = layers().PartialTPUEmbedding(
        features,
        table_optimizer(case),
        **({"size_threshold": 0} | threshold),
    )
    return make_runner(case, layer, form)


def make_tables(case):
    return [
        tfrs_embed.TableConfig(
            f"table_{i}",
            table.rows,
            table.dim,
            initializer=tf_steps.RowValues(),
            combiner="sum",
        )
        for i, table in enumerate(case.tables)
    ]


def table_optimizer(case):
    if case.kind == "forward":
        return None
    if case.optimizer == "RowWiseAdagrad":
        return tfrs_embed.optimizers.RowWiseAdagrad(
            case.learning_rate, cases.INITIAL_ACCUMULATOR, cases.EPSILON
        )
    return tf_steps.make_optimizer(case, keras.optimizers)


def make_runner(case, layer, form):
    layer.build()
    return tf_steps.make_runner(
        case,
        layer,
        layer.trainable_variables,
        keras,
        tf_steps.make_optimizer(case, keras.optimizers),
        form,
        kernels(),
        embed_to_train=functools.partial(layer, training=True),
    )


def kernels():
    """The library's line about its kernels."""
    try:
        module = importlib.import_module("tfrs_embed.kernels")
    except ModuleNotFoundError:
        return "this version has no kernels"
    return str(module.status())

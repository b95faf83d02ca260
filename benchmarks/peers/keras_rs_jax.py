"""keras_rs's layer on JAX."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np

from peers import Runner, keras_rs_layer, tf_steps


def make(case, form):
    if case.mlp:
        raise NotImplementedError("the model is not written for JAX")
    layer = keras_rs_layer.make_layer(case)
    optimizer = tf_steps.make_optimizer(case, keras.optimizers)
    rest = [v.value for v in layer.non_trainable_variables]
    tables = [v.value for v in layer.trainable_variables]
    slots = []
    if case.kind != "forward":
        optimizer.build(layer.trainable_variables)
        slots = [v.value for v in optimizer.variables]

    def embed(tables, ids):
        return layer.stateless_call(tables, rest, ids)[0]

    def loss(tables, ids):
        return sum(jnp.sum(a * a) for a in embed(tables, ids))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(tables, slots, ids):
        value, gradients = jax.value_and_grad(loss)(tables, ids)
        tables, slots = optimizer.stateless_apply(slots, gradients, tables)
        return tables, slots, value

    def step(ids):
        nonlocal tables, slots
        tables, slots, value = jax.block_until_ready(train(tables, slots, ids))
        return float(value)

    forward = jax.jit(embed)
    return Runner(
        # JAX's own integers have 32 bits.
        lambda batch: [jnp.asarray(ids.astype(np.int32)) for ids in batch],
        step,
        lambda ids: jax.block_until_ready(forward(tables, ids)),
    )

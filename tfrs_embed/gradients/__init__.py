"""When tables are updated.

The rule: a lookup's tables are updated once, by the `tape.gradient` whose
sources include the layer's scalar weight, eagerly and in functions alike. No
other tape's gradient updates a table. Where this can't be held an error is
raised; `docs/gradients.md` lists these places.

The mechanism:

1. Keras would make a dense gradient of a table, so the lookup is a custom
   gradient of one scalar weight, and the tables are not trainable variables.
2. TensorFlow calls the backward function of that gradient on the way to any
   source, and doesn't tell it the sources.
3. So `passes` wraps `tf.GradientTape.gradient`: while it runs, the thread has a
   `Pass` with the tape and the sources.
4. The backward function, `GradientUpdate.differentiate`, looks for the weight
   among the sources of the passes in its graph, and calls
   `engine.apply_gradients` if all have it.
5. It returns zero: nothing is left for the model's optimizer.
6. The backward function of a layer in a `tf.function` of its own is traced
   once, for all passes. The weight's value, which is 0 otherwise, tells it
   while a pass runs whether to update, and the loss scale: see
   `passes.Trigger`.
7. `loss_scale` has the loss of a `LossScaleOptimizer` tell the pass, so that
   the tables' gradients are divided by the scale.
8. `custom_gradients` lets custom gradients end with their graph, and so the
   tables with their model.

What the library changes in TensorFlow and Keras for the whole process follows.
Importing it changes none of these; what is changed stays so until the process
ends. `tests/test_private_api.py` compares the list with all attributes of
TensorFlow, and of both Keras versions, that training changes. The names hold
for TensorFlow 2.16 to 2.21, tf_keras of these versions and Keras 3.12 to 3.15.

Updates and tapes (`passes.install`): when a layer with tables is made. Every
tape pays for one Python call. Without it saliency maps and fine-tuning would
train tables. No public way: backward functions are not told sources, and
`tape.watched_variables()` has more than the sources.
    tensorflow.python.eager.backprop.GradientTape.gradient

Loss scales (`loss_scale.install`): when a layer of this Keras is made, for each
optimizer that scales a loss; the value is the same. Without it tables' updates
would be too large by the scale. No public way: Keras tells layers nothing, and
optimizers are made, and scale a first loss, before they know variables.
    keras.src.optimizers.base_optimizer.BaseOptimizer.scale_loss
    keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer.scale_loss
    tf_keras.src.mixed_precision.loss_scale_optimizer.LossScaleOptimizer.get_scaled_loss
    tf_keras.src.mixed_precision.loss_scale_optimizer.LossScaleOptimizerV3.get_scaled_loss

Built optimizers (`checkpoint.slot_order.install`): when a layer of this Keras
is made; others' optimizers pay for a look at their variables. Without it slots
would be restored into another variable; clipping that tables lack would be
silent; and of two gradients of an id in a batch Keras 3 would lose one. No
public way: Keras tells variables nothing of optimizers.
    keras.src.optimizers.base_optimizer.BaseOptimizer.build
    tf_keras.src.optimizers.optimizer._BaseOptimizer._build_index_dict

Pipelined loops (`sparsecore.pipelining`): when a pipelined table is on
SparseCores; functions that loops call are traced anew. Without it a function
that was traced outside of the loop would defer no updates. No public way: a
`tf.function` can't say that its trace depends on the loop.
    tensorflow.python.eager.polymorphic_function.function_context.make_function_context

Heartbeats (`distribution.heartbeats`): by `set_heartbeat_timeout`; it is an
attribute of the context, which strategies are made with. Without it the time is
TensorFlow's. No public way: strategies take no such argument.
    context.configure_coordination_service

Registries of TensorFlow and Keras that have entries of this library. They
concern its own classes and operations alone. The resolver and the saver's
predicate are asked about all, and answer by a rank or an attribute.
    keras.src.saving.object_registration.GLOBAL_CUSTOM_NAMES
    keras.src.saving.object_registration.GLOBAL_CUSTOM_OBJECTS
    tensorflow.python.framework.auto_control_deps._acd_resource_resolvers_registry
    tensorflow.python.framework.ops._gradient_registry
    tensorflow.python.framework.ops.gradient_registry
    tensorflow.python.framework.tensor_conversion_registry._tensor_conversion_func_cache
    tensorflow.python.framework.tensor_conversion_registry._tensor_conversion_func_registry
    tensorflow.python.util.dispatch._TYPE_BASED_DISPATCH_SIGNATURES
    tensorflow.python.util.tf_export._NAME_TO_SYMBOL_MAPPING
    tf_keras.src.saving.object_registration._GLOBAL_CUSTOM_NAMES
    tf_keras.src.saving.object_registration._GLOBAL_CUSTOM_OBJECTS

Not attributes: `checkpoint.saver` registers a saver of tables;
`kernels/cc` registers operations, and five graph passes, which change only
graphs that have these; `layers` registers its layers when a Keras is imported;
`distribution.dead_workers` runs as a worker ends.

These objects of a program are changed, and no others of their classes:

- a graph with a lookup: `get_operations`, by `custom_gradients`, which keeps
  its gradients in TensorFlow's registry while it lives;
- tables' variables: `_trackable_children`, by `checkpoint.saver`;
- an optimizer of Keras 3 that trains a small table: two methods, by
  `optimizers.repeated_rows`;
- the strategy of several workers in whose scope a layer of Keras 3 is made:
  `reduce`, which says more of an error;
- a loop with a pipelined table, by `sparsecore.pipelining`;
- a model that `keras3.fit` trains, its losses and their metrics, by
  `compat.private_keras_3`: in any other loop they compute as before.

`testing` replaces TensorFlow's operations of TPUs, and `tpu_check` the calls of
functions, in programs that use them.
"""

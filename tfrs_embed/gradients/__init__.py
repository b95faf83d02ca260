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

The library patches these parts of TensorFlow and Keras for the whole process,
but not at `import tfrs_embed`:

`tf.GradientTape.gradient` (`passes.install`)
    When a layer with tables is made; every tape then pays for one Python call.
    Without it, saliency maps and fine-tuning would train tables. No public way:
    backward functions are not told sources, and `tape.watched_variables()` has
    more than the sources.
optimizers of Keras
    `get_scaled_loss` and `scale_loss` (`loss_scale`), `_build_index_dict` and
    `build` (`checkpoint.slot_order`); of Keras 3 also `apply` and
    `_all_reduce_sum_gradients` (`compat.private_keras_3`). When a layer of this
    Keras is made; gradients and slots of other variables don't change. Without
    it, updates would be too large by the loss scale, slots would be restored
    into another variable, and of two gradients of an id in a batch one would be
    lost. No public way: Keras tells layers and variables none of these.
loops of Keras 3 (`compat.private_keras_3`)
    `_maybe_symbolic_build` and `make_predict_function`, when a layer is made or
    `keras3.fit` runs. Without it, Keras's own `fit` on several workers would
    fail with an error that says nothing about the cause.
losses of Keras 3 (`compat.private_keras_3`)
    `scale_loss_for_distribution`, `unscale_loss_for_distribution` and
    `reduce_values`, at the first step of `keras3.fit`; other loops compute as
    before. Without it, samples of a small last batch, and losses that are
    scalars, would count more than others. No public way: Keras scales losses
    by a function of its own.
`make_function_context` (`sparsecore.pipelining`)
    When a pipelined table is on SparseCores; functions that loops call are
    traced anew. Without it, a function that was traced outside of the loop
    would defer no updates. No public way: a `tf.function` can't say that its
    trace depends on the loop.

The library changes these single objects: `custom_gradients` replaces
`get_operations` of graphs that have a lookup, and moves its own entries of
TensorFlow's gradient registry; `sparsecore.pipelining` watches a loop's graph
for the loop's end; `checkpoint.saver` gives tables' variables a
`_trackable_children` of their own. In programs that use them, `testing`
replaces TensorFlow's operations of TPUs, and `tpu_check` replaces the calls of
functions.
"""

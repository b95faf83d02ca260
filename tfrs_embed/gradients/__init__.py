"""When a table is updated, and nothing else.

The rule: a lookup's tables are updated once, where the layer's scalar weight is
among the sources of a `tape.gradient`, eagerly and in functions alike. No other
tape's gradient updates a table. Where this can't be held an error is raised;
`docs/gradients.md` lists these places.

The mechanism:

1. Keras would make a dense gradient of a table, so the lookup is a custom
   gradient of one scalar weight, and the tables are no trainable variables.
2. TensorFlow calls the backward function of that gradient on the way to any
   source, and doesn't tell it the sources.
3. So `passes` wraps `tf.GradientTape.gradient`: while it runs, a `Pass` of the
   thread has the tape and the sources.
4. The backward function, `TableUpdate.differentiate`, looks for the weight
   among the sources of the passes in its graph, and calls
   `engine.apply_gradients` if all have it.
5. It returns zero: nothing is left for the model's optimizer.
6. The backward function of a layer in a `tf.function` of its own is traced
   once, for all passes.
7. It reads an `UpdateFlag`, a variable of the layer, as it runs; each pass sets
   the flag before, and resets it after.
8. A pass sets flags of layers that its own tape has seen, and no others. A flag
   that no pass has set raises an error.
9. `loss_scale` has the loss of a `LossScaleOptimizer` tell the pass, so that
   the tables' gradients are divided by the scale.
10. `lifetime` has custom gradients end with their graph, and so the tables with
    their model.

What the library patches, process-wide, in TensorFlow and Keras. `import
tfrs_embed` patches nothing:

+---------------------------+------------------------------------------------+
| `tf.GradientTape.gradient`| `passes.install`                               |
| when, and for whom        | a layer with tables is made; every tape pays   |
|                           | for one Python call                            |
| without it                | saliency maps and fine-tuning train tables     |
| public ways tried         | backward functions are not told sources;       |
|                           | `tape.watched_variables()` are more than these |
+---------------------------+------------------------------------------------+
| optimizers of Keras       | `get_scaled_loss`, `scale_loss`: `loss_scale`; |
|                           | `build`: `checkpoint.slot_order`; of Keras 3   |
|                           | `apply`, and the sum over replicas: `_keras_3` |
| when, and for whom        | a layer of this Keras is made; what gradients  |
|                           | and slots of other variables are stays         |
| without it                | updates too large by the loss scale; slots     |
|                           | restored into another variable; of an id in    |
|                           | two places of a batch one gradient is lost     |
| public ways tried         | Keras tells layers and variables nothing of    |
|                           | these                                          |
+---------------------------+------------------------------------------------+
| `make_function_context`   | `sparsecore.pipelining`                        |
| when, and for whom        | a pipelined table is on SparseCores; functions |
|                           | that loops call are traced anew                |
| without it                | a function that was traced outside of the loop |
|                           | defers no updates                              |
| public ways tried         | a `tf.function` can't say that its trace       |
|                           | depends on the loop                            |
+---------------------------+------------------------------------------------+

Beside these, of single objects: `lifetime` replaces `get_operations` of graphs
that have a lookup, and moves its own entries of TensorFlow's gradient registry;
`sparsecore.pipelining` watches a loop's graph for the loop's end;
`checkpoint.saver` gives tables' variables a `_trackable_children` of their own.
In programs that use them, `testing` replaces TensorFlow's operations of TPUs,
and `tpu_check` the calls of functions.
"""

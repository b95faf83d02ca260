"""What the embedding cores of TPUs do, in the place of their operations.

There are no such operations for a CPU. These take what TensorFlow's class
sends to the hardware: the configuration, in its protocol buffer, and each
step's ids, gradients and learning rates. The updates are those of
optimization_parameters.proto, written out once more.
"""

import tensorflow as tf
from tensorflow.core.protobuf.tpu import tpu_embedding_configuration_pb2
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.tpu import tpu_embedding_v2 as upstream


class EmbeddingCores:
    """The hardware of all chips of a slice.

    Args:
        strategy: an emulated slice.
        monkeypatch: pytest's.
    """

    def __init__(self, strategy, monkeypatch):
        kinds = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
        extended = type(strategy.extended)
        hardware = type("Hardware", (), {"embedding_feature": kinds.V1})()
        self.config = None
        self.tables = {}
        self.batches = {}
        self.training = []
        for target, name, value in [
            (extended, "tpu_hardware_feature", property(lambda _: hardware)),
            (upstream.tpu, "initialize_system_for_tpu_embedding", self._start),
            (upstream, "_load_variables_impl", self._load),
            (upstream, "_retrieve_variables_impl", self._retrieve),
            (
                upstream.TPUEmbedding,
                "_raise_error_for_incorrect_control_flow_context",
                lambda embedding: True,  # It is in a TPU's program.
            ),
        ]:
            monkeypatch.setattr(target, name, value)
        for name, value in {
            "is_tpu_embedding_initialized": lambda: self.config is not None,
            "enqueue_tpu_embedding_arbitrary_tensor_batch": self._enqueue,
            "recv_tpu_embedding_activations": self._activations,
            "send_tpu_embedding_gradients": self._update,
        }.items():
            monkeypatch.setattr(upstream.tpu_ops, name, value)

    def _start(self, config):
        self.config = config

    def _load(self, config, hosts, variables, table_config):
        for name, images in variables.items():
            mine = self.tables.setdefault(name, {})
            for slot, image in images.items():
                if slot not in mine:
                    mine[slot] = ResourceVariable(
                        image.variables[0], trainable=False
                    )
                mine[slot].assign(image.variables[0])

    def _retrieve(self, config, hosts, variables, table_config):
        for name, images in variables.items():
            for slot, image in images.items():
                image.variables[0].assign(self.tables[name][slot])

    def _enqueue(
        self,
        sample_indices_or_row_splits,
        embedding_indices,
        aggregation_weights,
        mode_override,
        device_ordinal,
        combiners,
    ):
        # It is chosen in the graph: tf.where(training, "train", "inference").
        training = mode_override.op.inputs[0]
        self.training.append(bool(tf.get_static_value(training)))
        found = []
        for i, (ids, weights) in enumerate(
            zip(embedding_indices, aggregation_weights, strict=True)
        ):
            feature = self.config.feature_descriptor[i]
            [samples] = feature.input_shape
            splits = sample_indices_or_row_splits[i]
            row = tf.repeat(tf.range(samples), splits[1:] - splits[:-1])
            if weights.shape[0] == 0:
                weights = tf.ones(tf.shape(ids), tf.float32)
            combiner = combiners[feature.table_id]
            scale = tf.ones([samples])
            if combiner != "sum":
                terms = weights if combiner == "mean" else weights**2
                total = tf.math.unsorted_segment_sum(terms, row, samples)
                total = total if combiner == "mean" else tf.sqrt(total)
                scale = tf.math.divide_no_nan(1.0, total)
            found.append((ids, row, weights * tf.gather(scale, row), samples))
        self.batches[self._replica()] = found
        return tf.no_op()

    def _activations(self, num_outputs, config):
        assert num_outputs == len(self.config.feature_descriptor)
        outputs = []
        for feature, (ids, row, gains, samples) in zip(
            self.config.feature_descriptor,
            self.batches[self._replica()],
            strict=True,
        ):
            name = self.config.table_descriptor[feature.table_id].name
            rows = tf.gather(self.tables[name]["parameters"], ids)
            outputs.append(
                tf.math.unsorted_segment_sum(
                    rows * gains[:, None], row, samples
                )
            )
        return outputs

    def _update(self, inputs, learning_rates, config):
        sent = tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration()
        sent.ParseFromString(config)
        assert sent == self.config
        tf.distribute.get_replica_context().merge_call(
            self._merged,
            args=(self.batches[self._replica()], inputs, learning_rates),
        )
        return tf.no_op()

    def _merged(self, strategy, batches, gradients, rates):
        local = strategy.experimental_local_results

        def of(value, replica):
            return tf.nest.map_structure(lambda v: local(v)[replica], value)

        replicas = range(strategy.num_replicas_in_sync)
        rates = [local(rate)[0] for rate in rates]
        for t, table in enumerate(self.config.table_descriptor):
            ids, rows = [], []
            for r in replicas:
                for i, feature in enumerate(self.config.feature_descriptor):
                    if feature.table_id != t:
                        continue
                    mine = [local(value)[r] for value in batches[i][:3]]
                    gradient = tf.gather(local(gradients[i])[r], mine[1])
                    ids.append(mine[0])
                    rows.append(gradient * mine[2][:, None])
            unique, index = tf.unique(tf.concat(ids, 0))
            g = tf.math.unsorted_segment_sum(
                tf.concat(rows, 0), index, tf.size(unique)
            )
            rule = table.optimization_parameters
            limits = rule.gradient_clipping_limits
            if limits.HasField("lower"):
                g = tf.maximum(g, limits.lower.value)
            if limits.HasField("upper"):
                g = tf.minimum(g, limits.upper.value)
            self._apply(
                self.tables[table.name],
                rule,
                unique,
                g,
                rates[rule.learning_rate.dynamic.tag]
                if rule.learning_rate.HasField("dynamic")
                else rule.learning_rate.constant,
            )

    def _apply(self, variables, rule, ids, g, rate):
        rows = {k: tf.gather(v, ids) for k, v in variables.items()}
        w = rows["parameters"]
        kind = rule.WhichOneof("parameters")
        if kind == "stochastic_gradient_descent":
            new = {"parameters": w - rate * g}
        elif kind == "adagrad":
            a = rows["accumulators"] + g**2
            new = {"parameters": w - rate * g / tf.sqrt(a), "accumulators": a}
        else:
            assert kind == "adam" and not rule.adam.use_non_lazy_adam
            b1, b2 = rule.adam.beta1, rule.adam.beta2
            m = b1 * rows["momenta"] + (1 - b1) * g
            v = b2 * rows["velocities"] + (1 - b2) * g**2
            if rule.adam.use_sum_inside_sqrt:
                step = m / tf.sqrt(v + rule.adam.epsilon**2)
            else:
                step = m / (tf.sqrt(v) + rule.adam.epsilon)
            new = {"parameters": w - rate * step, "momenta": m, "velocities": v}
        for name, value in new.items():
            variables[name].scatter_update(tf.IndexedSlices(value, ids))

    def _replica(self):
        context = tf.distribute.get_replica_context()
        return context._replica_id

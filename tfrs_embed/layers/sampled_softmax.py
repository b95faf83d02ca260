"""A softmax over a table's rows that computes some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfrs_embed.compat.arguments import integer
from tfrs_embed.configs.tables import FeatureSpec

if TYPE_CHECKING:
    from tfrs_embed.layers.table_layer import TableLayer

_SAMPLERS = {
    "log_uniform": tf.random.log_uniform_candidate_sampler,
    "uniform": tf.random.uniform_candidate_sampler,
}


def sampled_softmax(
    layer: TableLayer,
    feature: str,
    labels: Any,
    inputs: Any,
    num_sampled: int,
    sampler: str | Sequence[float] | tf.Tensor = "log_uniform",
    *,
    sampled_values: Sequence[Any] | None = None,
    remove_accidental_hits: bool = True,
    seed: int | None = None,
    training: bool | None = None,
) -> tf.Tensor:
    """The loss of `tf.nn.sampled_softmax_loss` over the rows of a table.

    The classes are the ids of a feature, and their weights the vectors that the
    layer looks up; there are no biases. So the output weights of a model can be
    a table of any size and placement, also the one that embeds its inputs. A
    logit is the dot product with the vector, less the logarithm of the number
    of times that its id is expected among the sampled ones (equation 3 of
    Jean et al., "On Using Very Large Target Vocabulary for Neural Machine
    Translation", 2015). Each call is a lookup, and so an update of its own: a
    table whose vectors the same step looks up elsewhere is updated twice.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     {"movie": tfrs_embed.FeatureConfig("movie", movies)}, "sgd"
        ... )
        >>> users = tf.ones([2, 8])
        >>> loss = tfrs_embed.sampled_softmax(
        ...     layer, "movie", [3, 5], users, num_sampled=100
        ... )
        >>> loss.shape
        TensorShape([2])

    Args:
        layer: the layer that holds the table.
        feature: the feature's path in the layer's configuration, such as
            "movie", or "user/movie" in nested dicts; the configuration of a
            single feature has the path "".
        labels: [batch] ids, the true classes.
        inputs: [batch, dim] floating, the outputs of the layers before.
        num_sampled: how many other ids to sample for the batch.
        sampler: "log_uniform", for ids in descending order of frequency;
            "uniform"; or the frequencies of all ids, [vocabulary_size], by
            which ids are drawn with repetitions.
        sampled_values: as of `tf.nn.sampled_softmax_loss`: ids [num_sampled],
            and how often each label [batch, 1] and each of them [num_sampled]
            is expected, instead of a sampler. Tables with `DynamicKeys` and
            features with `hashing` need them.
        remove_accidental_hits: whether a sampled id that is the label counts
            as none.
        seed: the sampler's.
        training: the argument of the layer's call.

    Returns:
        The losses, [batch] in the dtype of `inputs`.

    Raises:
        ValueError: there is no such feature, or a wrong shape or sampler; or
            the table has keys or the feature hashes, without `sampled_values`.
        tf.errors.InvalidArgumentError: an id is out of range.
    """
    num_sampled = integer(num_sampled, "num_sampled", least=1)
    spec = layer._spec
    paths = list(spec.structure.paths)
    if feature not in paths:
        raise ValueError(
            f"Layer '{layer.name}' has no feature with the path {feature!r}, "
            f"but {paths}."
        )
    place = paths.index(feature)
    found = spec.features[place]
    labels, inputs = map(tf.convert_to_tensor, (labels, inputs))
    if labels.dtype.is_integer:
        labels = tf.cast(labels, tf.int64)
    if labels.shape.rank != 1 or inputs.shape.rank != 2:
        raise ValueError(
            f"{found}: labels must have the shape [batch] and inputs [batch, "
            f"dim], got {labels.shape} and {inputs.shape}."
        )
    if sampled_values is None:
        sampled_values = _sample(found, labels, num_sampled, sampler, seed)
    sampled, expected, sampled_expected = map(
        tf.stop_gradient, map(tf.convert_to_tensor, sampled_values)
    )
    sampled = tf.cast(sampled, labels.dtype)
    ids = tf.concat([labels, sampled], 0)
    outputs = layer(
        spec.structure.pack({place: ids}), training=training, partial=True
    )
    vectors = spec.structure.flatten(outputs, "outputs", True)[place]
    of_labels, of_sampled = tf.split(
        tf.cast(vectors, inputs.dtype), [tf.size(labels), tf.size(sampled)]
    )
    right = tf.reduce_sum(inputs * of_labels, 1, keepdims=True)
    others = tf.matmul(inputs, of_sampled, transpose_b=True)
    right -= tf.math.log(tf.cast(tf.reshape(expected, [-1, 1]), inputs.dtype))
    others -= tf.math.log(tf.cast(sampled_expected, inputs.dtype))
    if remove_accidental_hits:
        hits = tf.equal(labels[:, None], sampled[None])
        others = tf.where(hits, others.dtype.min, others)
    logits = tf.concat([right, others], 1)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.zeros_like(labels, tf.int32), logits
    )


def _sample(
    feature: FeatureSpec,
    labels: tf.Tensor,
    num_sampled: int,
    sampler: Any,
    seed: int | None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Samples ids; see `sampled_values` of `sampled_softmax`."""
    if feature.hashing is not None or feature.table.keys is not None:
        raise ValueError(
            f"{feature}: its ids are no numbers below the table's size, so "
            "they can't be sampled here: pass sampled_values."
        )
    rows = feature.table.vocabulary_size
    # The lookup says what is wrong with labels that the table doesn't have.
    true = tf.clip_by_value(labels, 0, rows - 1)[:, None]
    if isinstance(sampler, str):
        if sampler not in _SAMPLERS:
            raise ValueError(
                f"sampler must be one of {list(_SAMPLERS)}, or the ids' "
                f"frequencies, got {sampler!r}."
            )
        return _SAMPLERS[sampler](true, 1, num_sampled, True, rows, seed=seed)
    counts = tf.cast(tf.convert_to_tensor(sampler), tf.float64)
    if not counts.shape.is_compatible_with([rows]):
        raise ValueError(
            f"sampler must have a frequency for each of {rows} ids, got the "
            f"shape {counts.shape}."
        )
    of_labels = tf.gather(counts, true)
    tf.debugging.assert_positive(
        of_labels, "sampled_softmax: a label has the frequency 0 in sampler."
    )
    ends = tf.cumsum(counts)
    drawn = tf.random.uniform([num_sampled], 0, 1, tf.float64, seed) * ends[-1]
    # The first whose end is above it: an id of frequency 0 is never drawn.
    sampled = tf.searchsorted(ends, drawn, side="right")
    sampled = tf.minimum(sampled, rows - 1)
    share = tf.cast(num_sampled, tf.float64) / ends[-1]
    return (
        sampled,
        of_labels * share,
        tf.gather(counts, sampled) * share,
    )

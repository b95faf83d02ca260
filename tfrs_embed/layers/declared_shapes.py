"""The shapes that a feature is declared with, of ids and of activations."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfrs_embed.configs.tables import FeatureConfig, FeatureSpec


def with_output_shape(feature: FeatureSpec, replicas: int) -> FeatureSpec:
    """Gives a feature an output_shape, so that dense ids are combined.

    Its batch_size becomes that of one replica. Raises a ValueError if the
    declared shapes contradict each other, or the batch can't be divided.
    """
    declared, output = feature.input_shape, feature.output_shape
    if not feature.combined:
        batch = (declared or (None,))[0]
        return dataclasses.replace(
            feature, batch_size=_of_replica(feature, batch, replicas)
        )
    if output is None and feature.max_sequence_length:
        output = (None, feature.max_sequence_length)
    elif output is None:
        output = (None, *(declared or ())[1:-1])
    combined = dataclasses.replace(feature, output_shape=output, by_sample=True)
    if not isinstance(feature.source, FeatureConfig):
        return combined
    shape = feature.source.output_shape or (None,)
    bags = (shape[0], *output[1:])
    if declared is not None:
        batch = _common_batch(declared, bags, feature.max_sequence_length)
        if batch == 0:
            raise ValueError(
                f"{feature}: ids of input_shape {list(declared)} can't become "
                f"an output of shape {[*bags, feature.width]}."
            )
        bags = (batch, *bags[1:])
    # Ids are not combined: a row of ragged ids is then a sequence.
    alone = declared is None or len(declared) == len(output)
    return dataclasses.replace(
        combined,
        batch_size=_of_replica(feature, bags[0], replicas),
        sequences=alone or feature.max_sequence_length > 0,
    )


def _of_replica(
    feature: FeatureSpec, batch: int | None, replicas: int
) -> int | None:
    """The size of one replica's part of a batch."""
    if batch is not None and batch % replicas:
        raise ValueError(
            f"{feature}: a batch of {batch} can't be divided among {replicas} "
            "replicas."
        )
    return batch and batch // replicas


def _common_batch(
    ids: tuple[int | None, ...], bags: tuple[int | None, ...], length: int
) -> int | None:
    """The batch size of ids and bags; 0: these ids can't become such bags."""
    wanted = tf.TensorShape(bags)
    # The three cases: ids not combined, combined over the last dimension, or in
    # a sequence.
    for shape in (ids, ids[:-1], (*ids[:-1], length)):
        if shape and wanted.is_compatible_with(shape):
            return wanted.merge_with(shape).as_list()[0]
    # Ragged and sparse ids may have a row for each vector of a sample.
    count = wanted.num_elements()
    if len(ids) == 2 and (None in (ids[0], count) or ids[0] == count):
        return bags[0]
    return 0

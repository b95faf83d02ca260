"""MovieLens's model as it is served: for MovieLens's own numbers."""

from __future__ import annotations

import pathlib

import movielens
import tensorflow as tf

import tfrs_embed


class Ratings(tf.Module):
    """Predicts the ratings that users give movies.

    Args:
        model: the model, of either Keras.
        data: the data set that it was trained on.
    """

    def __init__(
        self, model: tf.keras.Model, data: movielens.MovieLens
    ) -> None:
        super().__init__()
        self.model = model
        self._join = data.join
        # No row for unknown ids: they are errors.
        self.user_row, self.movie_row = (
            tf.keras.layers.IntegerLookup(vocabulary=ids, num_oov_indices=0)
            for ids in (data.user_ids, data.movie_ids)
        )

    def __call__(
        self, user_id: tf.Tensor, movie_id: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        rows = self.user_row(user_id), self.movie_row(movie_id)
        return {"rating": self.model(self._join(*rows), training=False)}


def export(
    model: tf.keras.Model,
    data: movielens.MovieLens,
    path: pathlib.Path,
    rows: str | None = None,
) -> None:
    """Writes a SavedModel.

    Args:
        model: the model, of either Keras.
        data: the data set that it was trained on.
        path: the folder to make.
        rows: the dtype of the tables' rows; see `tfrs_embed.serving.export`.
    """
    arguments = [
        tf.TensorSpec([None], tf.int64, name)
        for name in ("user_id", "movie_id")
    ]
    tfrs_embed.serving.export(
        model,
        path,
        rows=rows,
        signatures={"serving_default": (Ratings(model, data), arguments)},
    )

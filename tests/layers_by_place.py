"""Layers of one table in each place."""

from keras_under_test import layers
from tfrs_embed import FeatureConfig, FileStorage, TableConfig

ROWS, DIM = 50, 4


def make(
    strategy,
    name=None,
    kind=layers.PartialTPUEmbedding,
    threshold=0,
    folder=None,
    **options,
):
    """A built layer of a feature "f" and its table "t".

    Args:
        strategy: the layer's.
        name: the layer's.
        kind: the layer's class.
        threshold: its size_threshold.
        folder: where the table has its files; None: in memory.
        **options: further arguments of the table.
    """
    if folder is not None:
        options["storage"] = FileStorage(str(folder))
    table = TableConfig("t", ROWS, DIM, "uniform", **options)
    with strategy.scope():
        layer = kind(
            {"f": FeatureConfig("f", table)},
            optimizer="adagrad",
            size_threshold=threshold,
            name=name,
        )
        layer.build(None)
    return layer


#: Arguments of `make` by place; "files" needs a folder too.
PLACES = {
    "row": {},
    "keras": {"threshold": None},
    "bfloat16": {"dtype": "bfloat16"},
    "column": {"placement": "column"},
    "replicated": {
        "placement": "replicated",
        "kind": layers.DistributedEmbedding,
    },
    "hot": {"hot_rows": [3, 20]},
    "files": {},
}


def options_of(place, folder):
    """The arguments of `make` for a place."""
    files = {"folder": folder} if place == "files" else {}
    return {**PLACES[place], **files}

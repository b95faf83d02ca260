"""Contenders: each module makes a case's step with one library.

Their `make(case, form)` returns a `Runner`. Only its own process imports such a
module, so one that is not installed is missing from the report by name.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Runner:
    """A case that is ready to be run.

    Attributes:
        prepare: brings a batch, [batch, hotness] int64 for each feature, into
            the form that the other two take.
        step: does a training step and waits for it. Returns its loss.
        forward: returns the activations of each feature, or None if it has
            none that could be compared.
        info: what the report says about the library.
    """

    prepare: Callable[[list], Any]
    step: Callable[[Any], float]
    forward: Callable[[Any], list] | None
    info: str = ""


@dataclasses.dataclass(frozen=True)
class Peer:
    """Who takes part.

    Attributes:
        title: what the report calls it.
        module: makes it.
        packages: whose versions the report has.
        forms: kinds of ids, or of compilation, that it can be given. Of these
            the fastest is reported, of ours all.
        env: the process's environment, beside that of all.
    """

    title: str
    module: str
    packages: tuple[str, ...] = ()
    forms: tuple[str, ...] = ("dense",)
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    all_forms: bool = False

    def make(self, case, form):
        module = importlib.import_module(f"peers.{self.module}")
        return module.make(case, form)


_KERAS_2 = {"TF_USE_LEGACY_KERAS": "1"}
_KERAS_3 = {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "0"}
_BOTH = ("dense", "ragged")

PEERS = {
    "ours": Peer(
        "tfrs_embed, kernels",
        "ours",
        ("tfrs_embed", "tensorflow"),
        _BOTH,
        _KERAS_2,
        all_forms=True,
    ),
    "ours-ops": Peer(
        "tfrs_embed, TensorFlow's ops",
        "ours",
        forms=_BOTH,
        env={**_KERAS_2, "TFRS_EMBED_KERNELS": "off"},
        all_forms=True,
    ),
    "ours-keras3": Peer(
        "tfrs_embed.keras3, kernels",
        "ours",
        ("keras",),
        _BOTH,
        _KERAS_3,
        all_forms=True,
    ),
    "ours-default": Peer(
        "tfrs_embed, small tables in Keras layers",
        "ours_default",
        env=_KERAS_2,
    ),
    "distributed": Peer(
        "tfrs_embed DistributedEmbedding, kernels",
        "ours_distributed",
        env=_KERAS_2,
    ),
    "distributed-ops": Peer(
        "tfrs_embed DistributedEmbedding, TensorFlow's ops",
        "ours_distributed",
        env={**_KERAS_2, "TFRS_EMBED_KERNELS": "off"},
    ),
    "tfrs": Peer(
        "TFRS TPUEmbedding, legacy optimizer",
        "tfrs",
        ("tensorflow-recommenders",),
        _BOTH,
        _KERAS_2,
    ),
    "tf_keras": Peer(
        "tf_keras Embedding", "keras", ("tf_keras",), env=_KERAS_2
    ),
    "keras3": Peer("Keras 3 Embedding", "keras", ("keras",), env=_KERAS_3),
    "keras_rs-tf": Peer(
        "keras_rs DistributedEmbedding, TensorFlow",
        "keras_rs_tf",
        ("keras-rs", "keras"),
        env=_KERAS_3,
    ),
    "keras_rs-xla": Peer(
        "keras_rs DistributedEmbedding, TensorFlow with XLA",
        "keras_rs_tf",
        forms=("XLA",),
        env=_KERAS_3,
    ),
    "keras_rs-jax": Peer(
        "keras_rs DistributedEmbedding, JAX",
        "keras_rs_jax",
        ("jax",),
        env={"KERAS_BACKEND": "jax"},
    ),
    "torch": Peer(
        "torch EmbeddingBag(sparse=True)", "torch_bag", ("torch",), _BOTH
    ),
    "fbgemm": Peer(
        "fbgemm, fused update, ids unchecked",
        "fbgemm",
        ("fbgemm-gpu-cpu",),
        ("ragged",),
    ),
    "torchrec": Peer(
        "torchrec EmbeddingBagCollection, fused update",
        "torchrec",
        ("torchrec",),
        ("ragged",),
    ),
    "dense-tf": Peer("the dense part alone, TensorFlow", "dense_tf"),
    "dense-torch": Peer("the dense part alone, torch", "dense_torch"),
    "floor": Peer(
        "least memory traffic",
        "floor",
        # Its tables have pages of the size that the libraries' have.
        env={"NUMPY_MADVISE_HUGEPAGE": "0"},
    ),
}

"""Every way of looking up and training against the numpy reference.

The same tests run on one device, and in processes that have several replicas or
an emulated slice, each with the cases that are for it.
"""

import dataclasses
import os

import numpy as np
import pytest
import tensorflow as tf

from conformance.descriptors import (
    BATCH,
    ENGINES,
    FEW,
    KINDS,
    OPTIMIZERS,
    RULES,
    TABLES,
    UNEVEN,
    large_and_small,
    on_tpu,
)
from conformance.harness import (
    ONE_STEP,
    assert_outputs,
    assert_tables,
    build,
    check_step,
    make_step,
    make_steps,
    places_of,
    product,
    tensors,
    train,
    trainer,
)
from nightly_flag import ALL
from process_tiers import has_kernels, on
from strategies.replicas import add
from tfrs_embed import kernels
from tfrs_embed.distribution.row_exchange import TwoStages
from training_helpers import assert_unchanged, state


@dataclasses.dataclass(frozen=True)
class Case:
    """What a test builds, and how it runs that.

    Attributes:
        engine: a name in ENGINES.
        optimizer: a name in OPTIMIZERS.
        combiner: the tables'.
        weighted: whether ids have weights.
        kinds: of ids.
        mode: how a step runs: "eager" or "function".
        steps: how many are trained.
        tables: a name in TABLES, whose tables have optimizers of their own;
            None: `large_and_small()`.
        kernels: whether the compiled kernels must be there, are turned off, or
            None: it makes no difference here.
        dtype: the tables'; not of those of `tables`.
        sizes: of replicas' batches, in turns.
        nightly: whether only `make nightly` runs it.
    """

    engine: str
    optimizer: str | None = "adagrad"
    combiner: str | None = "mean"
    weighted: bool = True
    kinds: tuple[str, ...] = tuple(KINDS)
    mode: str = "function"
    steps: int = 2
    tables: str | None = None
    kernels: bool | None = None
    dtype: str = "float32"
    sizes: tuple[int, ...] = (BATCH,)
    nightly: bool = False

    def __str__(self):
        kinds = {tuple(KINDS): "all_kinds", FEW: "few"}
        words = [
            self.engine,
            self.optimizer,
            self.combiner,
            "weighted" if self.weighted else "unweighted",
            self.tables or kinds.get(self.kinds, "+".join(self.kinds)),
            self.mode,
            "" if self.dtype == "float32" else self.dtype,
            "" if self.sizes == (BATCH,) else "uneven",
            {True: "kernels", False: "tensorflow"}.get(self.kernels),
        ]
        return "-".join(word for word in words if word)

    def build(self, strategy, **options):
        group, world = ENGINES[self.engine].group, strategy.num_replicas_in_sync
        if group > 1 and (world <= group or world % group):
            pytest.skip("groups of two need four replicas")
        with strategy.scope():
            if self.tables:
                tables = TABLES[self.tables]
                layer, reference = build(
                    self.engine, tables, per_table=True, **options
                )
                self.check_exchange(layer)
                return layer, reference
            tables = large_and_small(
                self.combiner, self.optimizer, self.kinds, self.dtype
            )
            layer, reference = build(self.engine, tables, **options)
        self.check_exchange(layer)
        engine = ENGINES[self.engine]
        assert places_of(layer) == {"x": engine.large, "y": engine.small}
        return layer, reference

    def check_exchange(self, layer):
        """Asserts that rows travel in two stages if they are to."""
        if ENGINES[self.engine].group > 1:
            exchange = layer._engine_layer.engine._row_exchange
            assert isinstance(exchange, TwoStages)

    def train(self, strategy, layer, reference, **options):
        """Trains both; returns the last step's batches."""
        return train(
            trainer(strategy, layer, mode=self.mode),
            reference,
            strategy,
            self.steps,
            weighted=self.weighted,
            sizes=self.sizes,
            **self.tolerance,
            **options,
        )

    @property
    def tolerance(self):
        return {} if self.dtype == "float32" else ONE_STEP[self.dtype]


def nightly(*cases):
    """Cases that only `make nightly` runs."""
    return [dataclasses.replace(case, nightly=True) for case in cases]


def in_turns(*cases):
    """Cases with the compiled kernels and without; by day each with one."""
    found = both(*cases)
    if has_kernels():
        found = [
            dataclasses.replace(c, nightly=c.kernels == (c.combiner == "sum"))
            for c in found
        ]
    return found


def both(*cases):
    """Cases with the compiled kernels, then without."""
    return [
        dataclasses.replace(case, kernels=used)
        for used in (True, False)
        for case in cases
    ]


def mode_of(optimizer):
    """Functions take long to trace: by day one for each update rule."""
    return "function" if ALL or optimizer in RULES else "eager"


# "sharded" is tested with all kinds of ids, which other engines turn into rows
# as it does.
KINDS_OF_OTHERS = tuple(KINDS) if ALL else FEW
KINDS_OF_SLICES = (
    tuple(KINDS) if ALL else ("scalar", "combined", "ragged", "sparse_sequence")
)
pytestmark = [
    on(
        "mirrored:2",
        "mirrored:4",
        "workers:2",
        "workers:3",
        "keras:3",
        "keras:3 mirrored:2",
        tier="nightly",
    ),
    on("tpu:2x4"),
]

STRATEGY = os.environ.get("TFRS_EMBED_TEST_STRATEGY") or "device"
PLATFORM = STRATEGY.split(":")[0]


def cases(device=(), replicas=(), tpu=()):
    """Gives a test its cases on this process's platform; none: no test.

    Its attribute `replicas` has those on replicas, on all platforms.
    """
    found = {"device": device, "tpu": tpu}.get(PLATFORM, replicas)
    if not found:
        return lambda test: None
    if PLATFORM == "tpu":
        found = [dataclasses.replace(c, kinds=on_tpu(c.kinds)) for c in found]
    if ALL and found is replicas:
        anyhow = [case for case in found if case.kernels is None]
        found = [*(c for c in found if c.kernels is not None), *both(*anyhow)]
    marked = [
        pytest.param(c, marks=pytest.mark.nightly if c.nightly else ())
        for c in found
    ]
    mark = pytest.mark.parametrize("case", marked, ids=str, indirect=True)

    def give(test):
        test.replicas = list(replicas)
        return mark(test)

    return give


def with_kernels(case):
    """Whether a case doesn't turn the kernels off; for `on`."""
    return case.kernels is not False


def of_any_world(case):
    """Whether a case is with the kernels, and needs no four replicas."""
    return with_kernels(case) and ENGINES[case.engine].group == 1


#: Batches of replicas with fewer samples, and with none.
SIZES = (BATCH, 0, 3)


def uneven(engine, **options):
    """A case of batches of different sizes, some of them empty."""
    return Case(engine, kinds=UNEVEN, steps=3, sizes=SIZES, **options)


# Two stages need groups of two.
STAGES = on(
    "mirrored:4",
    tier="more",
    when=lambda case: with_kernels(case) and ENGINES[case.engine].group > 1,
)


def is_first(case):
    """Whether a case is the first of its kind of engine."""
    engines = (
        "sharded",
        "distributed_both",
        "dynamic_sharded",
        "hot_rows",
        "columns",
    )
    plain = case.dtype == "float32" and case.sizes == (BATCH,)
    return of_any_world(case) and case.engine in engines and plain


def is_first_of(*engines):
    """Whether a case is the first of its kind, of some engines."""
    return lambda case: is_first(case) and case.engine in engines


# What most changes to an engine would break.
STEPS = on(
    "mirrored:2", when=is_first_of("sharded", "dynamic_sharded", "hot_rows")
)
# Others find little there that one device's tests, STEPS and two workers don't.
OTHERS = on("mirrored:2", tier="nightly")


@pytest.fixture
def case(request):
    if request.param.kernels is False:
        with kernels.disabled():
            yield request.param
        return
    if request.param.kernels:
        request.getfixturevalue("needs_kernels")
    yield request.param


@cases(
    device=[
        *in_turns(
            *(
                Case(engine, "sgd", combiner, weighted, mode="eager")
                for engine in ("keras", "partial_small", "distributed")
                for combiner in ("sum", "mean", "sqrtn")
                for weighted in (False, True)
            ),
            Case("dynamic", "sgd", "mean", mode="eager"),
        ),
        Case("arrays", "sgd", mode="eager"),
    ],
    replicas=[
        *nightly(Case("keras", "sgd", kinds=FEW)),
        Case("sharded_small", "sgd", kinds=FEW),
    ],
    tpu=[
        Case("sparse_small", "sgd", kinds=FEW),
        *nightly(Case("dense_keras", "sgd", kinds=FEW)),
    ],
)
@OTHERS
@on(
    "mirrored:2",
    tier="more",
    when=of_any_world,
)
def test_lookup(case, strategy):
    layer, reference = case.build(strategy)
    look_up = trainer(strategy, layer, training=False, mode=case.mode)
    rng = np.random.default_rng(0)
    for _ in range(2):
        batches = make_steps(rng, reference, case.weighted, strategy)
        check_step(look_up, reference, batches, **case.tolerance)


@cases(
    device=[
        *in_turns(
            *(
                Case(
                    engine,
                    optimizer,
                    combiner,
                    weighted,
                    # One optimizer for all kinds, one kind for all optimizers.
                    tuple(KINDS) if optimizer == "adagrad" else FEW,
                    mode,
                    steps=3,
                )
                for optimizer in OPTIMIZERS
                for engine, combiner, weighted, mode in (
                    ("partial", "sum", False, mode_of(optimizer)),
                    ("partial", "mean", True, "eager"),
                    ("distributed", "sqrtn", True, "eager"),
                )
            ),
            Case("dynamic", kinds=KINDS_OF_OTHERS, steps=3),
            Case("host", kinds=KINDS_OF_OTHERS, steps=3),
            Case("distributed", combiner="sqrtn", steps=3),
            Case("partial", kinds=FEW, steps=3, dtype="bfloat16"),
            Case("distributed", kinds=FEW, mode="eager", dtype="bfloat16"),
        ),
        *(
            dataclasses.replace(c, kernels=True)
            for c in (
                Case("files", kinds=KINDS_OF_OTHERS, steps=3),
                Case("files", "adam", kinds=FEW, dtype="bfloat16"),
                *(
                    Case("files", optimizer, kinds=FEW, nightly=True)
                    for optimizer in OPTIMIZERS
                ),
                Case("spill", kinds=FEW, steps=6),
                *(
                    Case("spill", optimizer, kinds=FEW, steps=6, nightly=True)
                    for optimizer in OPTIMIZERS
                ),
            )
        ),
        Case("arrays", kinds=KINDS_OF_OTHERS, steps=3),
        Case("arrays", "adam", kinds=FEW, mode="eager"),
        Case("arrays", "row_wise_adagrad", kinds=FEW, dtype="bfloat16"),
        *(
            Case("dynamic", optimizer, kinds=FEW, mode="eager")
            for optimizer in OPTIMIZERS
        ),
        Case("distributed_dynamic", kinds=FEW),
    ],
    replicas=[
        Case("sharded"),
        *nightly(
            Case("sharded_arrays", "row_wise_adagrad", kinds=FEW, steps=3),
            Case("column_files", "row_wise_adagrad", kinds=FEW, kernels=True),
        ),
        *(
            Case(engine, "row_wise_adagrad", kinds=FEW, kernels=True)
            for engine in ("sharded_files", "spill_sharded")
        ),
        Case("distributed_both", kinds=KINDS_OF_OTHERS, steps=3),
        *nightly(
            Case("distributed_sharded", kinds=FEW, steps=3),
            Case("distributed_mirrored", kinds=FEW, steps=3),
            Case("columns_and_rows", kinds=FEW, steps=3),
            Case("columns_and_copies", kinds=FEW, steps=3),
        ),
        Case("distributed_mirrored", "row_wise_adagrad", kinds=FEW, steps=3),
        *(
            Case(engine, "row_wise_adam_max_norm", kinds=FEW, steps=3)
            for engine in ("sharded", "hot_rows", "distributed_mirrored")
        ),
        *nightly(
            Case("dynamic_sharded", "row_wise_adam_max_norm", kinds=FEW),
            Case("two_stages", "row_wise_adam_max_norm", kinds=FEW),
        ),
        Case("dynamic_sharded", kinds=KINDS_OF_OTHERS, steps=3),
        Case("two_stages", "adam", "sqrtn", kinds=FEW, steps=3),
        *nightly(Case("dynamic_two_stages", "adam", "sqrtn", kinds=FEW)),
        Case("hot_rows", kinds=KINDS_OF_OTHERS, steps=3),
        *nightly(Case("distributed_hot_rows", kinds=FEW, steps=3)),
        Case("columns", kinds=KINDS_OF_OTHERS),
        *nightly(Case("distributed_columns", kinds=FEW, steps=3)),
        *nightly(Case("hot_rows", kinds=FEW, steps=3, dtype="bfloat16")),
        Case("columns_and_copies", kinds=FEW, steps=3, dtype="bfloat16"),
        *map(uneven, ("sharded", "hot_rows_two_stages")),
        *nightly(
            *map(uneven, ("two_stages", "columns_and_copies", "hot_rows"))
        ),
    ],
    tpu=[
        Case("sparse", kinds=KINDS_OF_OTHERS),
        # Its small table is replicated, so that both see all kinds.
        Case("distributed_sparse", kinds=KINDS_OF_SLICES),
        Case("dense", kinds=("scalar", "matrix")),
        Case("distributed_dense", kinds=FEW),
    ],
)
@STEPS
@OTHERS
@on(
    "mirrored:2",
    tier="more",
    when=lambda case: (
        of_any_world(case)
        and case.optimizer != "row_wise_adam_max_norm"
        and case.engine not in ("columns", "sharded_files")
    ),
)
@on(
    "keras:3",
    when=lambda case: (
        with_kernels(case)
        and case.optimizer == "adagrad"
        and case.combiner == "mean"
        and case.engine in ("partial", "dynamic", "files")
    ),
)
@STAGES
@on(
    "keras:3 mirrored:2",
    tier="more",
    # What Keras 3 does is the same for all engines.
    when=lambda case: of_any_world(case) and case.engine == "sharded_files",
)
def test_training(case, strategy):
    layer, reference = case.build(strategy)
    case.train(strategy, layer, reference)
    assert_tables(layer, reference)
    assert layer.step.numpy() == case.steps


@cases(
    device=[
        *in_turns(
            Case("arrays", None, None, True, tables="width_4"),
            Case("partial", None, None, True, tables="width_4"),
            Case("partial", None, None, False, tables="width_40"),
            Case("dynamic", None, None, True, tables="width_4"),
        ),
        *both(Case("partial", None, None, False, tables="width_4")),
    ],
    replicas=both(
        Case("sharded", None, None, tables="one_row", sizes=SIZES),
        Case("columns_and_copies", None, None, tables="one_row", sizes=SIZES),
        Case("sharded", None, None, tables="two_widths", steps=3),
        Case("dynamic_sharded", None, None, tables="two_widths", steps=3),
        Case("two_stages", None, None, tables="two_widths", steps=3),
        *nightly(
            Case("dynamic_two_stages", None, None, tables="two_widths", steps=3)
        ),
        Case("hot_rows", None, None, tables="two_widths", steps=3),
        Case("columns", None, None, tables="even_widths", steps=3),
    ),
    tpu=[
        Case(engine, None, None, tables="stacked", steps=3)
        for engine in ("sparse", "dense")
    ],
)
@STAGES
# Two workers have the other engines in each run.
@on(
    "mirrored:2",
    tier="more",
    when=lambda case: (
        of_any_world(case) and case.engine in ("columns_and_copies", "hot_rows")
    ),
)
@on(
    "workers:2",
    when=lambda case: (
        with_kernels(case) and case.engine in ("dynamic_sharded", "columns")
    ),
)
# More replicas find little in other tests that two don't; from three on, the
# order of a sum matters.
@on(
    "mirrored:4",
    "workers:3",
    tier="more",
    when=lambda case: with_kernels(case) and case.engine == "columns",
)
@on(
    "keras:3",
    when=lambda case: (
        with_kernels(case)
        and case.engine in ("partial", "dynamic")
        and case.tables == "width_4"
    ),
)
def test_tables_of_many_optimizers(case, strategy):
    layer, reference = case.build(strategy)
    # One whose gradients don't cancel to what float32 has few digits of.
    case.train(strategy, layer, reference, seed=2)
    assert_tables(layer, reference)
    assert layer.step.numpy() == case.steps


@cases(
    device=[
        *in_turns(
            *(
                Case("keras", combiner=combiner, mode="eager")
                for combiner in ("sum", "mean", "sqrtn")
            )
        ),
    ],
)
def test_gradients_of_keras_tables(case, strategy):
    layer, reference = case.build(strategy)
    rng = np.random.default_rng(3)
    ids, weights, gradients = make_step(rng, reference, True)

    def step(ids, weights):
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights=weights)
            products = [product(outputs[k], gradients[k]) for k in outputs]
            loss = tf.add_n(products)
        found = tape.gradient(loss, layer.embedding_tables)
        return {k: tf.convert_to_tensor(g) for k, g in found.items()}

    found = step(tensors(ids), tensors(weights))
    sums = reference.row_gradients(ids, weights, gradients)
    tolerance = case.tolerance or {"rtol": 2e-5, "atol": 2e-5}
    for name, table in reference.tables.items():
        expected = np.zeros(table.rows.shape)
        for row, gradient in sums[name].items():
            expected[row] = gradient
        np.testing.assert_allclose(
            found[name], expected, err_msg=name, **tolerance
        )


@cases(
    device=[
        *in_turns(
            *(
                Case("partial_small", combiner=combiner, mode="eager")
                for combiner in ("sum", "mean", "sqrtn")
            ),
            Case("distributed", combiner="sqrtn", kinds=FEW),
            Case("dynamic", kinds=FEW, mode="eager"),
        ),
        Case("arrays", "adam", kinds=FEW, mode="eager"),
    ],
    replicas=[
        Case("columns_and_rows", combiner="sqrtn", kinds=FEW),
        *nightly(
            Case("sharded", kinds=FEW),
            Case("sharded"),
            Case("distributed_both", combiner="sqrtn", kinds=FEW),
            Case("columns_and_copies", kinds=FEW),
            Case("dynamic_sharded", kinds=FEW),
            Case("hot_rows", kinds=FEW),
            Case("two_stages", kinds=FEW),
            uneven("columns_and_copies"),
        ),
        uneven("sharded"),
    ],
)
@OTHERS
@on(
    "mirrored:2",
    tier="more",
    when=lambda case: of_any_world(case) and case.engine != "sharded",
)
@on("keras:3", tier="more", when=lambda case: case.engine == "distributed")
def test_gradients_of_weights(case, strategy):
    layer, reference = case.build(strategy)
    step = trainer(strategy, layer, mode=case.mode, of_weights=True)
    rng = np.random.default_rng(5)
    for _ in range(case.steps):
        batches = make_steps(rng, reference, True, strategy, case.sizes)
        for replica, outputs in step(batches).items():
            ids, weights, _ = batches[replica]
            vectors = reference.lookup(ids, weights)
            gradients = {
                f"{name}'s weights": g
                for name, g in reference.weight_gradients(
                    *batches[replica]
                ).items()
            }
            assert_outputs({k: outputs.pop(k) for k in vectors}, vectors)
            found = {k: np.ravel(outputs.pop(k)) for k in gradients}
            assert not outputs
            # A total near zero has few digits.
            assert_outputs(found, gradients, rtol=2e-4, atol=2e-4)
        reference.update(add([reference.row_gradients(*b) for b in batches]))
    assert_tables(layer, reference)


@cases(
    device=[
        *both(
            Case("keras", "adam", mode="eager"),
            Case("distributed", "adam", mode="eager"),
        ),
    ],
    replicas=[
        *(
            Case(engine, "adam", kinds=FEW, steps=1)
            for engine in ("sharded", "distributed_both", "columns")
        ),
        Case("hot_rows", "adam", kinds=("ragged",), steps=1),
        *nightly(Case("two_stages", "adam", "sqrtn", kinds=FEW)),
    ],
    tpu=[
        Case("sparse", "adam", kinds=FEW, steps=1),
        *nightly(Case("dense", "adam", kinds=FEW, steps=1)),
    ],
)
@on("mirrored:2", when=is_first_of("sharded", "columns"))
@OTHERS
@on(
    "mirrored:2",
    tier="more",
    when=is_first_of("hot_rows"),
)
def test_invalid_ids_count_as_absent(case, strategy):
    layer, reference = case.build(strategy, invalid_ids="zero")
    case.train(strategy, layer, reference)
    if case.engine != "keras":
        assert_tables(layer, reference)


@cases(
    # Of the table that is not sharded by row, or has copies of rows.
    replicas=[
        *(
            Case(engine, "adam", kinds=FEW)
            for engine in ("distributed_both", "columns")
        ),
        Case("hot_rows", "adam", kinds=("dense",)),
    ],
    tpu=[
        *(
            Case(engine, "adam", kinds=("dense",))
            for engine in ("sparse", "distributed_dense")
        ),
        *nightly(
            *(
                Case(engine, "adam", kinds=("dense",))
                for engine in ("dense", "distributed_sparse")
            )
        ),
    ],
)
@on("mirrored:2", when=is_first_of("distributed_both", "hot_rows"))
@OTHERS
@on(
    "mirrored:2",
    tier="more",
    when=is_first_of("columns"),
)
def test_a_bad_id_of_one_replica_changes_nothing(case, strategy):
    layer, reference = case.build(strategy)
    step = trainer(strategy, layer)
    batches = make_steps(np.random.default_rng(4), reference, False, strategy)
    step(batches)
    before = state(layer)
    batches[-1][0]["y_dense"][2] = 7
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"y_dense.*: id 7 is out of range; the table has 7 rows",
    ):
        step(batches)
    assert_unchanged(layer, before)
    batches[-1][0]["y_dense"][2] = 0
    step(batches)
    assert layer.step.numpy() == 2

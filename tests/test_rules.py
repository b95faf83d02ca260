"""What a rule says of itself holds wherever else the rule is."""

import dataclasses
import inspect
import pathlib
import re
import typing

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import documentation
import keras_under_test
import random_kernel_calls
import reference
import tfrs_embed.kernels
import update_rules
from conformance.descriptors import fresh, optimizer_of
from keras_under_test import keras
from tfrs_embed import optimizers, types
from tfrs_embed.ops import compiled
from tfrs_embed.optimizers import conversion, rules
from tfrs_embed.optimizers.rules import RULES
from tfrs_embed.tools.conversion.keras_slots import KERAS_SLOTS

OF_TPU = [rule for rule in RULES if rule.tpu]
NAMED = [rule for rule in RULES if rule.tpu or rule.declared]
ROWS_H = pathlib.Path(tfrs_embed.kernels.__file__).parent / "cc" / "rows.h"


def name_of(rule):
    return rule.__name__


EVERY = pytest.mark.parametrize("rule", RULES, ids=name_of)


def test_this_packages_optimizers_have_the_defaults_of_their_rules():
    declared = {r.declared.__name__: r for r in RULES if r.declared}
    assert set(declared) < set(optimizers.__all__)
    for name, rule in declared.items():
        optimizer = getattr(optimizers, name)()
        assert conversion.convert(optimizer, "Table 't'").rule == rule()


@EVERY
def test_a_rule_is_among_what_the_tests_compare_with_the_reference(rule):
    assert update_rules.RULES[rule.__name__].cases
    assert rule in map(type, random_kernel_calls.RULES.values())


def test_the_kernels_number_the_rules_alike():
    [body] = re.findall(r"enum TfrsRule \{(.*?)\};", ROWS_H.read_text(), re.S)
    numbers = {
        name.lower(): int(number)
        for name, number in re.findall(r"\bk(\w+) = (\d+)", body)
    }
    assert numbers.pop("sum") == 0
    assert numbers == {
        rule.__name__.lower(): rule.loop
        for rule in RULES
        if rule.loop is not None
    }


@EVERY
def test_a_rules_settings_have_room_in_the_kernels(rule):
    [room] = re.findall(r"float settings\[(\d+)\]", ROWS_H.read_text())
    assert len(rule().loop_settings()) <= int(room)


@pytest.mark.parametrize("case", update_rules.CASES)
def test_an_optimizer_of_a_rule_becomes_it(case):
    rule, settings = update_rules.CASES[case]
    given = fresh(optimizer_of(rule, settings))
    made = conversion.convert(given, "Table 't'", keras)
    assert made.rule == getattr(rules, rule)(**settings)


def test_the_page_of_one_device_lists_the_rules_and_names():
    page = (documentation.ROOT / "docs/one_device.md").read_text("utf-8")
    section = page.partition("\n## Optimizers\n")[2].partition("\n## ")[0]
    words = {*re.findall(r"\w+", section)}
    assert {rule.__name__ for rule in RULES} <= words
    assert {rule.keras for rule in RULES if rule.keras} <= words
    assert {*typing.get_args(types.OptimizerName)} <= words


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.keras], ids=name_of
)
def test_a_rule_knows_the_slots_of_keras(rule):
    """Those of an optimizer with the settings of the rule's last case."""
    *_, settings = update_rules.RULES[rule.__name__].cases.values()

    def made_by(module):
        kind = getattr(module, rule.keras)
        known = inspect.signature(kind).parameters
        return kind(**{k: v for k, v in settings.items() if k in known})

    if hasattr(tf_keras.optimizers.legacy, rule.keras):
        legacy = made_by(tf_keras.optimizers.legacy)
        legacy._create_all_weights([tf.Variable([1.0])])
        assert {*legacy.get_slot_names()} <= {*KERAS_SLOTS}
    new = made_by(keras.optimizers)
    if keras_under_test.NUMBER == 2:
        new.build([tf.Variable([1.0])])
        slots = [v.name for v in new.variables if v.shape.rank]
        assert all({*name.split("/")} & {*KERAS_SLOTS} for name in slots)
    else:
        new.build([keras.Variable([1.0])])
        slots = {
            own: variables
            for name, own in KERAS_SLOTS.items()
            if isinstance(variables := getattr(new, name, None), list)
            and variables
        }
        assert {*slots} == {*rule().slots()}
        for [variable] in slots.values():
            assert variable.shape == (1,)


@pytest.mark.parametrize("rule", OF_TPU, ids=name_of)
def test_a_rule_has_the_defaults_of_tensorflows_optimizer(rule):
    assert conversion.convert(rule.tpu(), "Table 't'").rule == rule()


@EVERY
def test_a_rule_has_the_defaults_of_the_reference(rule):
    update = inspect.signature(update_rules.RULES[rule.__name__].update)
    defaults = {
        name: parameter.default
        for name, parameter in update.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert dataclasses.asdict(rule()) == defaults
    begin = reference.Table(np.zeros([1, 1]), rule=rule.__name__).slots
    assert {
        name: (slot.initial, [1, *slot.row(1)])
        for name, slot in rule().slots().items()
    } == {k: (v.flat[0], list(v.shape)) for k, v in begin.items()}


@pytest.mark.parametrize(
    "name",
    [name for name, rule in random_kernel_calls.RULES.items() if rule.tpu],
)
def test_a_rule_is_the_same_after_it_was_tensorflows_optimizer(name):
    rule = random_kernel_calls.RULES[name]
    made = conversion.to_tpu(rule, 0.5, "Table 't'")
    assert type(made) is rule.tpu
    assert conversion.convert(made, "Table 't'").rule == rule


def test_the_names_of_optimizers_are_those_of_tensorflows_and_ours():
    named = [
        type(conversion.convert(name, "Table 't'").rule)
        for name in typing.get_args(types.OptimizerName)
        if name not in OF_KERAS
    ]
    assert {*named} == {*NAMED} and len(named) == len(NAMED)


OF_KERAS = {"adamw": "AdamW", "rmsprop": "RMSprop"}


@pytest.mark.parametrize("name", OF_KERAS)
def test_a_name_is_kerass_optimizer_with_its_defaults(name):
    table = tfrs_embed.TableConfig("t", 9, 4, "ones")
    feature = tfrs_embed.FeatureConfig("f", table)

    def trained(layer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([1, 5])) ** 2)
        tape.gradient(loss, layer.trainable_variables)
        return layer.embedding_tables["t"].numpy()

    def make(optimizer):
        return keras_under_test.layers.PartialTPUEmbedding(
            feature, optimizer, size_threshold=0
        )

    by_name = make(name)
    again = make(name).get_config()  # Before it is built.
    expected = trained(make(getattr(keras.optimizers, OF_KERAS[name])()))
    assert not np.array_equal(expected[1], expected[2])
    np.testing.assert_array_equal(trained(by_name), expected)
    by_name.table_optimizers["t"].learning_rate = 0.25
    for config in again, by_name.get_config():
        copy = type(by_name).from_config(config)
        copy.build(None)
        given = 0.001 if config is again else 0.25
        assert copy.table_optimizers["t"].learning_rate == np.float32(given)


def test_an_unknown_optimizer_named_momentum_is_told_its_class():
    with pytest.raises(ValueError, match=r"'t'.*SGD\(momentum=0.9\)"):
        conversion.convert("momentum", "Table 't'")


def test_a_rule_that_tpus_dont_have_is_an_error_that_says_what_they_have():
    class Own(rules.SGD):
        """A formula that TensorFlow has no optimizer of."""

        tpu = None

    with pytest.raises(ValueError) as e:
        conversion.to_tpu(Own(), 0.5, "Table 't'")
    assert str(e.value) == (
        "Table 't': TPUs don't have the update rule Own; use SGD, Adagrad, "
        "AdagradMomentum, Adam or FTRL of tf.tpu.experimental.embedding, or "
        "an optimizer that has such a rule."
    )


def test_a_rule_of_ones_own_does_not_get_its_parents_loop():
    class Own(rules.SGD):
        """Another formula."""

    assert compiled.has_rule(rules.SGD())
    assert not compiled.has_rule(Own())

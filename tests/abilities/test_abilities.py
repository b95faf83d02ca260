"""What layers can do in Keras is what docs/abilities.md says."""

import os

import pytest
import tensorflow as tf

from abilities import descriptors, on_replicas
from abilities.cases import CASES
from abilities.saving import EACH_CHANGE
from abilities.table import PAGE, outcome, parse, render
from keras_under_test import NUMBER
from process_tiers import nightly, on, process_of
from tfrs_embed.compat.version import NEWEST_TENSORFLOW

# Its cells share trained models.
pytestmark = [
    on("mirrored:2"),
    on("keras:3", "keras:3 mirrored:2", "tpu:2x4", tier="nightly"),
    pytest.mark.xdist_group("abilities"),
]
STRATEGY_NAME = os.environ.get("TFRS_EMBED_TEST_STRATEGY", "")
PROCESS = process_of(STRATEGY_NAME, str(NUMBER))
MODULE = on_replicas if STRATEGY_NAME else descriptors
TEXT = PAGE.read_text(encoding="utf-8")
EXPECTED = parse(TEXT)


@on("keras:3", tier="more", when=lambda case: case.name in EACH_CHANGE)
@nightly(MODULE.is_costly)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("title", MODULE.ABILITIES)
def test_a_cell_is_what_the_page_says(title, case, strategy):
    if not tf.__version__.startswith(NEWEST_TENSORFLOW + "."):
        pytest.skip("the page has the errors of the newest TensorFlow")
    expected = EXPECTED.get((PROCESS, title, case.name), "missing")
    arguments = [strategy] if STRATEGY_NAME else []
    found = outcome(MODULE.ABILITIES[title], case, *arguments)
    assert found == expected, (
        f"Cell '{title}' of {case.name} was '{expected}', is '{found}'. If "
        "that is meant, run `python -m abilities.table --write` in the folder "
        "tests, and write it into CHANGELOG.md."
    )


def test_the_page_is_made_of_its_cells():
    assert render(EXPECTED) == TEXT

"""What layers can do in Keras is what docs/abilities.md says."""

import pytest
import tensorflow as tf

import fronts
from abilities.descriptors import ABILITIES, CASES, is_costly
from abilities.table import PAGE, outcome, parse, render
from plans import nightly, on
from tfrs_embed.compat.version import NEWEST_TENSORFLOW

# Its cells share trained models.
pytestmark = [on("keras:3"), pytest.mark.xdist_group("abilities")]
TEXT = PAGE.read_text(encoding="utf-8")
EXPECTED = parse(TEXT)


@nightly(is_costly)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("title", ABILITIES)
def test_a_cell_is_what_the_page_says(title, case):
    if not tf.__version__.startswith(NEWEST_TENSORFLOW + "."):
        pytest.skip("the page has the errors of the newest TensorFlow")
    expected = EXPECTED.get((str(fronts.NUMBER), title, case.name), "missing")
    found = outcome(ABILITIES[title], case)
    assert found == expected, (
        f"Cell '{title}' of {case.name} was '{expected}', is '{found}'. If "
        "that is meant, run `python -m abilities.table --write` in the folder "
        "tests, and write it into CHANGELOG.md."
    )


def test_the_page_is_made_of_its_cells():
    assert render(EXPECTED) == TEXT

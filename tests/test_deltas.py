"""Full checkpoints with deltas between, on one device."""

import pytest
import tensorflow as tf

from delta_cases import check_chain


@pytest.mark.parametrize("placement", ["one", "keys"])
def test_a_delta_restores_what_a_full_checkpoint_would(
    placement, tmp_path, both_implementations
):
    check_chain(tf.distribute.get_strategy(), placement, tmp_path, [])

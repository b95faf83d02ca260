"""Full checkpoints with deltas between, of tables on several replicas."""

import pytest
import tensorflow as tf

from delta_checkpoints import KEYED, PLACEMENTS, check_chain
from process_tiers import on


@on("mirrored:2", "workers:2", tier="nightly")
@on("mirrored:2", when=lambda placement: placement == "column")
@on("mirrored:2", tier="more", when=lambda placement: placement == "spill")
@on("workers:2", when=lambda placement: placement == "row")
@on("workers:2", tier="more", when=lambda placement: placement == "keys")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_delta_restores_what_a_full_checkpoint_would(
    strategy, placement, tmp_path, request
):
    if placement == "spill":
        request.getfixturevalue("needs_kernels")
    one = tf.distribute.get_strategy()
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    alike = placement in (*KEYED, "replicated")
    other = placement if alike else "one"
    others = [] if several else [(one, other)]
    check_chain(strategy, placement, tmp_path, others, background=not several)

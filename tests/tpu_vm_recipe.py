"""Follows docs/tpu.md from an empty TPU VM to a trained step, without a TPU.

    python tests/tpu_vm_recipe.py

In place of the page's program an emulated slice trains a step. Takes 3 minutes
and downloads 1 GB.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
STEP = """
import tensorflow as tf
import tensorflow_recommenders
import tfrs_embed

strategy = tfrs_embed.testing.EmulatedTPUStrategy("v5p-8")
table = tfrs_embed.TableConfig("movie", 20_000, 8)
with strategy.scope():
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("movie", table), "adagrad", batch_size=8
    )

@tf.function
def train(ids):
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) ** 2)
        tape.gradient(loss, layer.trainable_variables)
        return loss

    return strategy.reduce("SUM", strategy.run(step, (ids,)), axis=None)

first, second = (float(train(tf.range(8))) for _ in range(2))
assert layer.placement.tables[0].engine == "sparsecore" and second < first
print("losses:", first, second)
resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
tf.config.experimental_connect_to_cluster(resolver)
try:
    tf.tpu.experimental.initialize_tpu_system(resolver)
except tf.errors.InternalError as error:
    print("no TPU:", type(error).__name__)
else:
    raise AssertionError("This machine has TPUs: run the page's program.")
"""


def run(command, folder, code=0):
    """Runs a command; returns what it printed."""
    print(f"$ {command}", flush=True)
    done = subprocess.run(
        ["sh", "-c", command],
        env={
            **os.environ,
            "TF_USE_LEGACY_KERAS": "1",
            "TPU_SKIP_MDS_QUERY": "1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, (done.returncode, done.stderr[-3000:])
    return done.stdout + done.stderr


def main():
    page = (ROOT / "docs" / "tpu.md").read_text("utf-8")
    section = page.partition("## From an empty TPU VM")[2]
    [recipe] = re.findall(r"```\n(.*?)```", section, re.DOTALL)[:1]
    *commands, last = recipe.splitlines()
    assert last == "tpu/bin/python train.py"
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            command = command.replace("python3", sys.executable, 1)
            run(command.replace(" . ", f" '{ROOT}' "), folder)
        pathlib.Path(folder, "train.py").write_text(STEP)
        print(*re.findall("(?:no TPU|losses):.*", run(last, folder)), sep="\n")
        # What the page says of the newest libtpu.
        run("tpu/bin/pip install --no-deps --upgrade libtpu", folder)
        found = run("tpu/bin/tfrs-embed info", folder, code=1)
        assert "aborts with libtpu" in found, found
        found = run("tpu/bin/python -c 'import tensorflow'", folder, code=134)
        assert "not available in this library" in found, found


if __name__ == "__main__":
    main()

"""Replicas for the examples: devices of this process, or of many workers.

A worker joins a cluster that `TF_CONFIG` or Slurm describes. Where there is
none, `run_workers` starts one on this machine, to try things with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import tensorflow as tf
from absl import flags

import tfrs_embed

FLAGS = flags.FLAGS

# Tells a worker that it shares this machine with others, and with how many.
_SHARING = "EXAMPLES_WORKERS_HERE"
_LAST_LINES = 20
# Slurm's jobs may share a host: each has ports of its own, one for each task of
# the host. From 32768 on Linux gives ports to whoever asks for any.
_FIRST_PORT = 16384
_PORTS = 16
_JOBS = 1024


def given() -> bool:
    """Tells whether this process is a worker of a cluster."""
    return FLAGS.slurm or bool(os.environ.get("TF_CONFIG"))


def run_workers(workers: int) -> None:
    """Runs this program in worker processes on this machine.

    Prints what the first one prints.

    Args:
        workers: their number.

    Raises:
        SystemExit: one failed; none is left running.
    """
    # Killed or interrupted, this process must not leave workers behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    command = [sys.executable, *sys.argv]
    env = {_SHARING: str(workers), "PYTHONUNBUFFERED": "1"}
    with (
        tfrs_embed.testing.LocalCluster(command, workers, env) as cluster,
        cluster.log(0).open(errors="replace") as log,
    ):
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            time.sleep(0.1)
            codes = [process.poll() for process in cluster.processes]
            print(log.read(), end="", flush=True)
        # The others fail when one of them does, but some seconds later.
        for worker, code in enumerate(codes):
            if code:
                lines = cluster.output(worker).splitlines()[-_LAST_LINES:]
                raise SystemExit(
                    f"Worker {worker} {_how_it_ended(code)}. Its last lines:\n"
                    + "\n".join(f"  {line}" for line in lines)
                )


def _how_it_ended(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def join() -> tf.distribute.Strategy:
    """Joins the cluster that this process is a worker of.

    It has to be the first that a program does with TensorFlow.

    Returns:
        The strategy, over all devices of all workers.

    Raises:
        SystemExit: the cluster's description is not right.
    """
    try:
        if FLAGS.slurm:
            os.environ["TF_CONFIG"] = json.dumps(_slurm_cluster())
        config = json.loads(os.environ["TF_CONFIG"])
        here = int(os.environ.get(_SHARING, 1))
        if here > 1:
            _take_share(config["task"]["index"], here)
        gpus = tf.config.get_visible_devices("GPU")
        # Left to itself, TensorFlow would go through the hosts' memory.
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation(
                "NCCL" if gpus else "AUTO"
            )
        )
        return tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=options
        )
    except (RuntimeError, ValueError) as error:
        source = "Slurm's variables" if FLAGS.slurm else "TF_CONFIG"
        raise SystemExit(f"{source}: {error}") from None


def _slurm_cluster() -> dict[str, object]:
    """Returns what TF_CONFIG would be for this Slurm task."""
    job = int(os.environ.get("SLURM_JOB_ID", 0))
    first = _FIRST_PORT + job % _JOBS * _PORTS
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
        port_base=first,
        # It would count GPUs with nvidia-smi, and fail where there are none.
        # Which GPUs a task sees is up to Slurm; these numbers change nothing.
        gpus_per_node=int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)),
        gpus_per_task=1,
        auto_set_gpu=False,
    )
    workers = resolver.cluster_spec().as_dict()["worker"]
    # The resolver sorts the nodes, "n10" before "n9", unlike Slurm's numbers
    # of tasks, so the task's place is that of its address.
    port = first + int(os.environ.get("SLURM_LOCALID", 0))
    index = workers.index(f"{os.environ.get('SLURMD_NODENAME')}:{port}")
    return {
        "cluster": {"worker": workers},
        "task": {"type": "worker", "index": index},
    }


def _take_share(index: int, workers: int) -> None:
    """Leaves the other workers of this machine their part of it."""
    gpus = tf.config.list_physical_devices("GPU")
    each = len(gpus) // workers
    tf.config.set_visible_devices(
        gpus[index * each : (index + 1) * each], "GPU"
    )
    # TensorFlow would start as many threads as there are cores, in each.
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def check_batch_size(batch_size: int, strategy: tf.distribute.Strategy) -> None:
    """Ends the program if replicas can't share a batch evenly.

    Raises:
        SystemExit: they can't.
    """
    if batch_size % strategy.num_replicas_in_sync:
        raise SystemExit(
            f"--batch_size {batch_size} doesn't divide by "
            f"{strategy.num_replicas_in_sync} replicas."
        )


def of_strategy() -> tf.distribute.Strategy:
    """Makes the replicas that --strategy asks for; see `local_replicas`."""
    _, _, replicas = FLAGS.strategy.partition(":")
    return local_replicas(int(replicas or 1))


def local_replicas(replicas: int | None) -> tf.distribute.Strategy:
    """Makes replicas of this process's GPUs, or parts of its CPU.

    It has to be the first that a program does with TensorFlow.

    Args:
        replicas: their number; None: all GPUs, or two without any.

    Returns:
        The strategy.

    Raises:
        SystemExit: there are fewer GPUs.
    """
    gpus = tf.config.list_physical_devices("GPU")
    replicas = replicas or len(gpus) or 2
    if gpus and replicas > len(gpus):
        raise SystemExit(f"{replicas} replicas, but only {len(gpus)} GPUs.")
    if replicas == 1:
        return tf.distribute.get_strategy()
    kind = "GPU" if gpus else "CPU"
    if not gpus:
        [cpu] = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
        )
    return tf.distribute.MirroredStrategy(
        [f"{kind}:{i}" for i in range(replicas)]
    )


def is_first(strategy: tf.distribute.Strategy) -> bool:
    """Tells the worker that speaks for all."""
    return strategy.extended.should_checkpoint

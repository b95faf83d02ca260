"""A slice of two hosts, as servers: which of them reads and writes tables.

    python tpu_hosts.py FOLDER

starts the servers, on whose CPUs the parts of a table are, as chips have them.
This process is the coordinator: it saves the table to FOLDER and restores it.
It prints the bytes that each process has written to files and read from them.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys

import numpy as np
import tensorflow as tf

from tfrs_embed.storage.sharded import Part, ShardedVariable

HOSTS, CHIPS, ROWS, DIM = 2, 4, 200_000, 64


def serve(cluster, host):
    server = tf.distribute.Server(cluster, "worker", host)
    print("ready", flush=True)
    server.join()


def table(rows=ROWS):
    """A table whose rows are on the chips in turns."""
    held = []
    for chip in range(CHIPS):
        part = Part(range(chip, rows, CHIPS))
        with tf.device(f"/job:worker/task:{chip * HOSTS // CHIPS}/CPU:0"):
            held.append((part, tf.Variable(tf.zeros([len(part.rows), DIM]))))
    strategy = tf.distribute.get_strategy()
    return ShardedVariable("t/parameters", (rows, DIM), held, strategy)


def traffic(processes):
    """The bytes that each process has written and read so far."""
    found = []
    for process in processes:
        with open(f"/proc/{process}/io") as file:
            io = dict(line.split(": ") for line in file.read().splitlines())
        found.append([int(io["wchar"]), int(io["rchar"])])
    return np.array(found)


def coordinate(cluster, servers, folder):
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(cluster), "coordinator", 0
    )
    saved = table()
    blocks = (
        (start, start + tf.reshape(tf.range(1e4 * DIM), [-1, DIM]))
        for start in range(0, ROWS, 10_000)
    )
    saved.write_blocks(blocks)
    processes = [os.getpid(), *(server.pid for server in servers)]
    before = traffic(processes)
    path = tf.train.Checkpoint(t=saved).save(f"{folder}/table")
    written = traffic(processes) - before
    restored = table()
    before = traffic(processes)
    tf.train.Checkpoint(t=restored).restore(path).assert_consumed()
    for _, variable in zip(restored._parts, restored._variables, strict=True):
        float(variable[0, 0])  # What the hosts were told to do is done.
    read = traffic(processes) - before
    values = saved.numpy()
    assert values[12_345, 7] == 10_000 + 2_345 * DIM + 7
    np.testing.assert_array_equal(restored.numpy(), values)
    # Of a small one the first host writes all.
    small = tf.train.Checkpoint(t=table(rows=100))
    for number in range(20):
        small.write(f"{folder}/small-{number}")
    print(json.dumps([written[:, 0].tolist(), read[:, 1].tolist()]))


def main(folder):
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(HOSTS + 1):
            found = stack.enter_context(socket.create_server(("localhost", 0)))
            ports.append(found.getsockname()[1])
    coordinator, *workers = [f"localhost:{port}" for port in ports]
    cluster = {"coordinator": [coordinator], "worker": workers}
    servers = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps(cluster), str(host)],
            stdout=subprocess.PIPE,
        )
        for host in range(HOSTS)
    ]
    try:
        for server in servers:
            server.stdout.readline()
        coordinate(cluster, servers, folder)
    finally:
        for server in servers:
            server.kill()


if __name__ == "__main__":
    if sys.argv[2:]:
        serve(json.loads(sys.argv[1]), int(sys.argv[2]))
    else:
        main(sys.argv[1])

"""What server.cc does, in Python: for where there is no C++ compiler.

    python server.py FOLDER

It imports TensorFlow, and nothing of the library that made the model.
"""

from __future__ import annotations

import socketserver
import sys

import numpy as np
import tensorflow as tf


def main() -> None:
    """Loads the model and serves it on a free port, which it prints."""
    model = tf.saved_model.load(sys.argv[1])

    def answer(lines: list[str]) -> str:
        called = "serving_default"
        if lines and lines[0].startswith("@"):
            called, lines = lines[0][1:].strip(), lines[1:]
        signature = model.signatures[called]
        specs = signature.structured_input_signature[1]
        given = {}
        for line in lines:
            name, shape, text = line.rstrip("\n").split(" ", 2)
            if specs[name].dtype == tf.string:
                given[name] = tf.constant(text)
                continue
            dims = [int(size) for size in shape.split("x")]
            array = np.array(text.split(), specs[name].dtype.as_numpy_dtype)
            given[name] = tf.constant(array.reshape(dims))
        found = signature(**given)
        return "".join(
            f"{name} {'x'.join(map(str, found[name].shape)) or 'scalar'} "
            f"{' '.join(f'{value:.9g}' for value in np.ravel(found[name]))}\n"
            for name in sorted(found)
        )

    class Handler(socketserver.StreamRequestHandler):
        """Serves a connection until the client closes it."""

        def handle(self) -> None:
            lines = []
            for line in self.rfile:
                if line != b"\n":
                    lines.append(line.decode())
                    continue
                try:
                    text = answer(lines)
                except (KeyError, ValueError, tf.errors.OpError) as error:
                    text = f"error {' '.join(str(error).split())}\n"
                self.wfile.write(f"{text}\n".encode())
                lines = []

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()

"""Runs tests in forks of a process that has TensorFlow imported already.

    python fork_server.py FOLDER

TensorFlow takes seconds to import, most tests milliseconds. FOLDER holds the
package and its tests. They are imported by the forks alone, so each sees what
is on the disk at that time. Requests and replies are lines of JSON on standard
input and output. A request has

    files: the test files to collect, relative to FOLDER
    tests: the tests to run, in this order; null for all
    env: environment variables
    patience: seconds after which a test is taken to hang, and the fork killed
    cover: whether to record the lines that each test runs

and its reply

    status: pytest's exit status, null if a test hangs, -1 if the fork crashed
    failed: the tests that failed, or the one that hangs or crashed
    seconds: what each test took
    output: the end of what was printed
    lines: with cover, for each module the lines that each test ran
"""

import contextlib
import gc
import json
import os
import pathlib
import resource
import signal
import sys
import tempfile
import time
import traceback

# Before TensorFlow is imported, as tests/conftest.py would.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
# What was compiled before a mutation must not be taken for its module.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.dont_write_bytecode = True

import coverage  # noqa: E402
import hypothesis  # noqa: E402, F401
import numpy  # noqa: E402, F401
import pytest  # noqa: E402
import tensorflow  # noqa: E402, F401

# Its Arrow starts threads, which forks don't have: they import it themselves.
sys.modules["pandas"] = None
import tensorflow_recommenders  # noqa: E402, F401
import tf_keras  # noqa: E402, F401

del sys.modules["pandas"]

# Beside this one's folder; it imports nothing of the package.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from forked_scripts import redirect  # noqa: E402

FOLDER = pathlib.Path(sys.argv[1]).resolve()
#: Bytes that a fork may address; tests need a third of it.
MEMORY = 12 * 2**30


class Plugin:
    """Picks the tests, and records what they do."""

    def __init__(self, tests, cover, current):
        self._order = (
            None if tests is None else {t: i for i, t in enumerate(tests)}
        )
        self._cover = cover
        self._current = current
        self.failed = []
        self.seconds = {}

    # After pytest's own order, which is by fixtures.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if self._order is not None:
            picked = [i for i in items if i.nodeid in self._order]
            items[:] = sorted(picked, key=lambda i: self._order[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._current.write_text(item.nodeid)
        if self._cover:
            self._cover.switch_context(item.nodeid)
        result = yield
        if self._cover:
            self._cover.switch_context("")
        return result

    def pytest_runtest_logreport(self, report):
        before = self.seconds.get(report.nodeid, 0)
        self.seconds[report.nodeid] = before + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)


def _lines(data):
    """For each module the lines that each test ran, as bits of a number."""
    lines = {}
    for file in data.measured_files():
        tests = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            for test in contexts:
                tests[test] = tests.get(test, 0) | 1 << line
        name = pathlib.Path(file).relative_to(FOLDER).as_posix()
        lines[name] = {test: hex(bits) for test, bits in tests.items()}
    return lines


def _run_tests(request, current):
    os.environ.update(request["env"])
    os.chdir(FOLDER)
    sys.path.insert(0, str(FOLDER))
    cover = None
    if request["cover"]:
        cover = coverage.Coverage(
            data_file=None,
            config_file=False,
            source=[str(FOLDER / "tfrs_embed")],
        )
        cover.start()
    plugin = Plugin(request["tests"], cover, current)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["--hypothesis-seed=0", "--tb=short"]
    options += [] if cover else ["-x"]
    status = pytest.main([*options, *request["files"]], [plugin])
    import tfrs_embed

    if FOLDER not in pathlib.Path(tfrs_embed.__file__).parents:
        raise RuntimeError(f"Tested {tfrs_embed.__file__}, not {FOLDER}.")
    reply = {
        "status": int(status),
        "failed": plugin.failed,
        "seconds": plugin.seconds,
    }
    if cover:
        cover.stop()
        reply["lines"] = _lines(cover.get_data())
    return reply


def _run_child(request, reply_file, output_file, current):
    os.setsid()
    # A mutant may ask for all memory that there is.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    redirect(output_file)
    try:
        reply = _run_tests(request, current)
    except BaseException:
        # A mutated package may not even be importable.
        traceback.print_exc()
        reply = {"status": 1, "failed": [], "seconds": {}}
    sys.stdout.flush()
    sys.stderr.flush()
    pathlib.Path(reply_file).write_text(json.dumps(reply))
    # No handlers at exit: they are the parent's.
    os._exit(0)


def answer(request):
    """Runs a request's tests in a fork; returns the reply."""
    with tempfile.TemporaryDirectory() as folder:
        reply_file = pathlib.Path(folder, "reply.json")
        output_file = pathlib.Path(folder, "output.txt")
        current = pathlib.Path(folder, "current.txt")
        current.touch()
        start = time.monotonic()
        child = os.fork()
        if not child:
            _run_child(request, reply_file, output_file, current)
        timed_out = False
        while not (ended := os.waitpid(child, os.WNOHANG)[0]):
            if time.time() - current.stat().st_mtime > request["patience"]:
                timed_out = True
                break
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            # With the processes that the tests may have started.
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
        if reply_file.exists() and not timed_out:
            reply = json.loads(reply_file.read_text())
        else:
            reply = {
                "status": None if timed_out else -1,
                "failed": [t for t in [current.read_text()] if t],
                "seconds": {},
            }
        output = output_file.read_text() if output_file.exists() else ""
        return {
            **reply,
            "output": output[-2000:],
            "wall": time.monotonic() - start,
        }


def main():
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.freeze()
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()

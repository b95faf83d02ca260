"""Changes the package in small ways, and looks which changes no test finds.

    python tests/mutation/run.py [--count 310] [--seed 1] [--only ops/bags]

Mutants are cosmic-ray's. A first run of all tests records which lines each of
them reaches; a mutant then meets those that reach its line, quick ones first.
The package is changed in copies of it, one for each worker. What is found goes
to .mutation, where a run that was stopped goes on.
"""

import argparse
import ast
import collections
import compileall
import contextlib
import hashlib
import json
import pathlib
import py_compile
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed

import mutants

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]

sys.path[:0] = [str(ROOT), str(HERE.parent)]
import process_tiers  # noqa: E402

#: What is changed.
MODULES = [
    "tfrs_embed/ops/**/*.py",
    "tfrs_embed/engines/**/*.py",
    "tfrs_embed/storage/**/*.py",
    "tfrs_embed/optimizers/**/*.py",
]
#: Test files that start processes of their own, or know nothing of MODULES.
LEFT_OUT = [
    "test_checkpoint_crashes.py",
    "test_checkpoint_matrix.py",
    "test_docs.py",
    "test_docstrings.py",
    "test_faults.py",
    "test_keras_3.py",
    "test_keras_3_front.py",
    "test_keras_3_layers.py",
    "test_private_api.py",
    "test_random_kills.py",
    "test_kernel_checks.py",
    "test_operation_calls.py",
    "test_sparsecore_host.py",
    "test_strategies.py",
    "test_tpu_check.py",
    "test_tpu_strategies.py",
    "test_two_keras_versions.py",
]


def suites():
    """Strategies, "" for none, and files."""
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        if path.name not in LEFT_OUT:
            yield "", f"tests/{path.name}"
    yield "", "tests/conformance/test_conformance.py"
    # A fork is one process, and has one Keras imported.
    for process in process_tiers.NAMES:
        if process.startswith(("mirrored", "tpu")):
            for name in process_tiers.files(process):
                yield process, f"tests/{name}"


class Worker:
    """A copy of the package and its tests, and a process that runs them."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        unwanted = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for name in ("tfrs_embed", "tests", "docs", "examples"):
            shutil.copytree(ROOT / name, self.folder / name, ignore=unwanted)
        shutil.copy(ROOT / "pyproject.toml", self.folder)
        # By hashes: a mutant may be as large and as old as its module.
        compileall.compile_dir(
            self.folder / "tfrs_embed",
            quiet=1,
            invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
        )
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"

    def ask(
        self,
        strategy,
        files,
        tests=None,
        cover=False,
        patience=600,
    ):
        request = {
            "files": files,
            "tests": tests,
            "env": {
                "TFRS_EMBED_TEST_STRATEGY": strategy,
                # All that is asked for runs, if any test is.
                "TFRS_EMBED_TEST_TIER": "test more" if strategy else "",
            },
            "cover": cover,
            "patience": patience,
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()


class Workers:
    """Runs functions of a worker and an item on all workers."""

    def __init__(self, count, stack):
        self._free = queue.Queue()
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._count = count
        for i in range(count):
            worker = Worker(pathlib.Path(folder, str(i)))
            stack.callback(worker.close)
            self._free.put(worker)

    def map(self, function, items):
        def run(item):
            worker = self._free.get()
            try:
                return function(worker, item)
            finally:
                self._free.put(worker)

        with ThreadPoolExecutor(self._count) as pool:
            for future in as_completed([pool.submit(run, i) for i in items]):
                yield future.result()


def read(path):
    """The lines of a file of JSON, if there is one."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def append(path, record):
    """Adds a line to a file of JSON."""
    with path.open("a") as output:
        print(json.dumps(record), file=output)


def record_tests(workers, path):
    """Runs all tests unchanged, and records which lines they reach."""
    known = {(r["strategy"], r["file"]) for r in read(path)}
    todo = [suite for suite in suites() if suite not in known]

    def record(worker, suite):
        strategy, file = suite
        reply = worker.ask(strategy, [file], cover=True)
        return {"strategy": strategy, "file": file, **reply}

    for result in workers.map(record, todo):
        append(path, result)
        print(
            f"{result['strategy']:10} {result['file']}:",
            f"{len(result['seconds'])} tests, {result['wall']:.0f} s",
            flush=True,
        )
        # Five stands for no tests.
        if result["status"] not in (0, 5):
            print(result["output"])


class Tests:
    """Which tests reach which lines."""

    def __init__(self, records):
        #: By module: strategy, file, test, seconds, lines as bits.
        self._by_module = collections.defaultdict(list)
        for record in records:
            failed = set(record["failed"])
            for module, tests in record.get("lines", {}).items():
                for test, bits in tests.items():
                    if test and test not in failed:
                        self._by_module[module].append(
                            (
                                record["strategy"],
                                record["file"],
                                test,
                                record["seconds"][test],
                                int(bits, 16),
                            )
                        )

    def of(self, module, first, last):
        """Those that reach any of the lines."""
        wanted = sum(1 << line for line in range(first, last + 1))
        return [t for t in self._by_module[module] if t[-1] & wanted]


def _in_order(tests, budget):
    """Quick tests first; each more of a function's parameters counts as slower.

    Not all parameters before slow tests, nor a function's last ones after them:
    one of them may be all that finds a mutant.
    """
    seen = collections.Counter()
    ordered = []
    for test in sorted(tests, key=lambda t: t[3]):
        function = test[0], test[2].partition("[")[0]
        seen[function] += 1
        ordered.append((test[3] * seen[function] ** 0.5, test))
    ordered.sort(key=lambda pair: pair[0])
    total = 0
    for _, test in ordered:
        total += test[3]
        if total > budget and total > test[3]:
            return
        yield test


def enclosing(tree, line, end):
    """First and last lines of what is around a line, innermost first.

    Of a definition the body counts, as a decorator or a default runs when the
    module is imported.
    """
    spans = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.stmt, ast.ExceptHandler)):
            continue
        if isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            span = (node.body[0].lineno, node.end_lineno)
        else:
            first = node.lineno
            span = (first, node.end_lineno)
            if body := getattr(node, "body", None):
                header = (first, max(first, body[0].lineno - 1))
                if end <= header[1]:
                    span = header
        if first <= line and end <= node.end_lineno:
            spans.append((node.end_lineno - first, span))
    return [span for _, span in sorted(spans)]


def choose(tests, tree, mutant, budget):
    """The tests that a mutant meets.

    Returns:
        Them, the number of all that reach its lines, and whether these are the
        lines of the mutant itself or only lines around it.
    """
    module, first, last = mutant["module"], mutant["start"][0], mutant["end"][0]
    exact = True
    for span in [*enclosing(tree, first, last), (1, 10**4)]:
        if found := tests.of(module, *span):
            return list(_in_order(found, budget)), len(found), exact
        exact = False
    return [], 0, False


def try_mutant(worker, mutant, tests, budget):
    """Whether the tests find a mutant: "killed", "survived" or "timeout"."""
    path = worker.folder / mutant["module"]
    source = path.read_text(encoding="utf-8")
    mutated = mutants.mutate(source, mutant)
    chosen, reaching, exact = choose(tests, ast.parse(source), mutant, budget)
    result = {
        **mutant,
        "diff": mutants.difference(source, mutated),
        "reached": exact,
        "tests": len(chosen),
        "reaching": reaching,
        "budget": budget,
        "outcome": "survived",
        "wall": 0,
    }
    by_strategy = collections.defaultdict(list)
    for test in chosen:
        by_strategy[test[0]].append(test)
    path.write_text(mutated, encoding="utf-8")
    try:
        for strategy, group in by_strategy.items():
            patience = 60 + 5 * max(t[3] for t in group)

            def ask(tests, patience, strategy=strategy, group=group):
                files = sorted({t[1] for t in group if t[2] in tests})
                reply = worker.ask(strategy, files, tests, patience=patience)
                result["wall"] += reply["wall"]
                return reply

            ids = [t[2] for t in group]
            reply = ask(ids, patience)
            if reply["status"] in (None, -1):
                # Other programs may have kept the machine busy, or its memory.
                reply = ask(reply["failed"] or ids, 2 * patience)
                if reply["status"] == 0:
                    reply = ask(ids, 2 * patience)
            if reply["status"] == 0:
                continue
            result["outcome"] = (
                "timeout" if reply["status"] is None else "killed"
            )
            result["status"] = reply["status"]
            result["strategy"] = strategy
            result["killer"] = reply["failed"][:1]
            result["output"] = reply["output"][-600:]
            break
    finally:
        path.write_text(source, encoding="utf-8")
    return result


def check_killers(workers, results, tests_path):
    """Runs the tests that found mutants once more, on the package unchanged."""
    files = {}
    for record in read(tests_path):
        for test in record["seconds"]:
            files[record["strategy"], test] = record["file"]
    by_strategy = collections.defaultdict(set)
    for result in results:
        for test in result.get("killer", ()):
            if (result["strategy"], test) in files:
                by_strategy[result["strategy"]].add(test)

    def check(worker, item):
        strategy, tests = item
        chosen = sorted({files[strategy, t] for t in tests})
        return worker.ask(strategy, chosen, sorted(tests))

    for reply in workers.map(check, by_strategy.items()):
        if reply["status"] != 0:
            print("Fails on the package unchanged:", *reply["failed"])


def key(mutant):
    """Tells a mutant from others."""
    return mutant["module"], mutant["operator"], mutant["occurrence"]


def latest(path):
    """Each mutant's last result."""
    return list({key(r): r for r in read(path)}.values())


def is_done(result, budget):
    """Whether a larger budget would find nothing more."""
    return (
        result["outcome"] != "survived"
        or result["tests"] == result["reaching"]
        or result["budget"] >= budget
    )


def print_report(results):
    """Counts by module, and the survivors."""
    outcomes = ["killed", "timeout", "survived"]
    by_module = collections.defaultdict(collections.Counter)
    for result in results:
        by_module[result["module"]][result["outcome"]] += 1
        by_module["all"][result["outcome"]] += 1
    print(f"{'module':45}", *(f"{o:>9}" for o in outcomes), "   share")
    for module, counts in sorted(by_module.items()):
        share = 1 - counts["survived"] / counts.total()
        print(
            f"{module:45}",
            *(f"{counts[o]:9}" for o in outcomes),
            f"{share:8.0%}",
        )
    for result in sorted(results, key=lambda r: (r["module"], r["start"])):
        if result["outcome"] == "survived":
            reached = "" if result["reached"] else ", which none reaches"
            print(
                f"\n{result['module']}:{result['start'][0]}"
                f" survives {result['tests']} of {result['reaching']}"
                f" tests{reached}"
                f"\n{result['diff']}"
            )


def digest(modules):
    """Tells whether sources are those that a run began with."""
    tests = sorted((ROOT / "tests").glob("**/*.py"))
    content = b"".join(
        p.read_bytes()
        for p in [*(ROOT / m for m in modules), *tests]
        if HERE not in p.parents
    )
    return hashlib.sha256(content).hexdigest()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=310)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a module's path")
    parser.add_argument(
        "--budget",
        type=float,
        default=60,
        help="seconds, when recorded, of the tests that a mutant meets; with "
        "more than before, survivors meet more",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--folder", type=pathlib.Path, default=ROOT / ".mutation"
    )
    parser.add_argument("--list", action="store_true", help="show the mutants")
    parser.add_argument("--report", action="store_true", help="only report")
    args = parser.parse_args()

    modules = sorted(
        str(path.relative_to(ROOT))
        for pattern in MODULES
        for path in ROOT.glob(pattern)
        if args.only in str(path)
    )
    chosen = mutants.sample(modules, args.count, args.seed)
    if args.list:
        for mutant in chosen:
            source = pathlib.Path(mutant["module"]).read_text()
            print(mutant["module"], mutant["start"], mutant["operator"])
            print(mutants.difference(source, mutants.mutate(source, mutant)))
        return

    args.folder.mkdir(exist_ok=True)
    recorded, found = args.folder / "tests.jsonl", args.folder / "found.jsonl"
    state = args.folder / "state"
    if not args.report:
        if state.exists() and state.read_text() != digest(modules):
            parser.error(f"The sources have changed: remove {args.folder}.")
        state.write_text(digest(modules))
        with contextlib.ExitStack() as stack:
            workers = Workers(args.workers, stack)
            record_tests(workers, recorded)
            tests = Tests(read(recorded))
            done = {key(r) for r in latest(found) if is_done(r, args.budget)}
            todo = [m for m in chosen if key(m) not in done]

            def attempt(worker, mutant):
                return try_mutant(worker, mutant, tests, args.budget)

            for result in workers.map(attempt, todo):
                append(found, result)
                print(
                    f"{result['outcome']:9} {result['wall']:4.0f} s",
                    f"{result['module']}:{result['start'][0]}",
                    result["operator"],
                    flush=True,
                )
            check_killers(workers, latest(found), recorded)
    print_report(latest(found))


if __name__ == "__main__":
    main()

"""`tfrs-embed`: its help, its exit statuses, and commands of its own."""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
import tfrs_embed_command
from tfrs_embed import kernels
from tfrs_embed.compat.strategies import require_sparse_core_api
from tfrs_embed.kernels import build, files
from tfrs_embed.sparsecore import LimitsReport, compute_limits
from tfrs_embed.tools import command_line
from tfrs_embed.tools.commands import info
from tfrs_embed.tools.conversion import command
from tfrs_embed_command import COMMANDS, main, make_parser

pytestmark = pytest.mark.tools

ROOT = pathlib.Path(tfrs_embed.__file__).parents[1]


@pytest.fixture(autouse=True)
def log_level(monkeypatch):
    """Commands set the variable where it isn't."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


def leaves(parser, path=()):
    """All commands' parsers, those within others too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from leaves(child, (*path, name))
    yield path, parser


def outside(code, **env):
    """Runs code in a process that has not imported anything."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


# The command line as a whole.


def test_without_arguments_it_shows_its_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: tfrs-embed [-h] [--version] COMMAND ...")
    for name, (_, summary) in COMMANDS.items():
        assert name in shown
        assert summary in " ".join(shown.split())


def test_the_help_says_what_the_commands_say_themselves():
    light, whole = make_parser([]), make_parser(COMMANDS)
    assert light.format_help() == whole.format_help()
    assert command_line.EXIT_STATUS in light.format_help()


def test_each_commands_help_has_an_example_and_exit_statuses():
    found = dict(leaves(make_parser(COMMANDS)))
    assert ("checkpoint", "convert") in found and ("kernels", "build") in found
    for path, parser in found.items():
        text = parser.format_help()
        assert command_line.EXIT_STATUS in text, path
        assert f"  tfrs-embed {' '.join(path)}".rstrip() in text, path
        assert all(len(line) <= 80 for line in text.splitlines()), path


def test_what_it_says_of_itself_needs_no_tensorflow():
    done = outside(
        "import sys, tfrs_embed_command as c\n"
        "assert c.main([]) == 0\n"
        "for arguments in ['--version'], ['--help'], ['nothing']:\n"
        "    try:\n"
        "        c.main(arguments)\n"
        "    except SystemExit as end:\n"
        "        print(arguments, end.code)\n"
        "assert not {'tensorflow', 'tfrs_embed', 'numpy'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    assert f"tfrs-embed {tfrs_embed.__version__}\n" in done.stdout
    for line in "['--version'] 0", "['--help'] 0", "['nothing'] 2":
        assert line in done.stdout
    assert "invalid choice: 'nothing'" in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["--json", "info"], "unrecognized arguments: --json"),
        (["--"], "the following arguments are required: COMMAND"),
        (["info", "--", "more"], "info runs no script"),
        (["kernels"], "the following arguments are required: ACTION"),
        (["checkpoint"], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_usage_is_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_what_ends_it_is_said_in_a_line(monkeypatch, capsys):
    def interrupt(environment):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "gather", interrupt)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "error: interrupted.\n"

    def fail(name):
        raise ImportError("cannot import\n  name 'x'")

    monkeypatch.setattr(tfrs_embed_command.importlib, "import_module", fail)
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "error: cannot import name 'x'\n"


@pytest.mark.parametrize(
    "line",
    [
        "info",
        "checkpoint inspect {}/c",
        "checkpoint inspect {}/c --json",
        "checkpoint convert {}/c {}/new",
        "report {}/c --output {}/page.html",
        "plan {}/model.json",
        "plan {}/model.json --json",
        "limits {}/model.json --topology=v6e-4 --draw=1 --size-threshold=5",
        "kernels status",
    ],
)
def test_a_reader_may_have_read_enough(line, monkeypatch, tmp_path, capsys):
    with open(tmp_path / "model.json", "w") as file:
        json.dump(MODEL, file)
    layer = tfrs_embed.Embedding(3, 2)
    layer(tf.constant([0]))
    tf.train.Checkpoint(layer=layer).write(str(tmp_path / "c"))

    def run(command):
        read, write = os.pipe()
        os.close(read)
        with monkeypatch.context() as patch, open(write, "w") as closed:
            patch.setattr(sys, "stdout", closed)
            return command()

    arguments = [each.replace("{}", str(tmp_path)) for each in line.split()]
    assert run(lambda: main(arguments)) == 1
    assert "rror" not in capsys.readouterr().err
    if arguments[0] == "checkpoint":
        old = command.main
        arguments = [each.replace("/new", "/newer") for each in arguments]
        finish = tfrs_embed_command.finish
        assert run(lambda: finish(lambda: old(arguments[1:]))) == 1
        assert "rror" not in capsys.readouterr().err


def test_only_tpu_check_passes_arguments_on(monkeypatch):
    parser = make_parser(["tpu-check"])
    known = dict(leaves(parser))["tpu-check",]
    assert known.get_default("arguments") == []
    given = {}

    def run(args):
        given.update(vars(args))
        return 0

    monkeypatch.setattr(tfrs_embed.tpu_check.command, "run", run)
    assert main(["tpu-check", "a.py", "--topology=v5p-8", "--", "-x"]) == 0
    assert given["arguments"] == ["-x"]
    assert main(["tpu-check", "a.py", "--topology=v5p-8"]) == 0
    assert given["arguments"] == []


def test_tensorflow_starts_quietly_and_errors_are_passed_on(tmp_path):
    # A module that says what TensorFlow's libraries say, and then aborts.
    (tmp_path / "tensorflow.py").write_text(
        "import os\n"
        "os.write(2, b'WARNING: All log messages before absl::Init\\n'\n"
        "            b'I0000 00:00:17.1 1 port.cc:153] oneDNN\\n'\n"
        "            b'E0000 00:00:17.1 1 x.cc:1] failed\\n'\n"
        "            b'F0000 without an end of line')\n"
        "if os.environ.get('ABORT'):\n"
        "    os.abort()\n"
        "raise ImportError(os.environ['TF_CPP_MIN_LOG_LEVEL'])\n"
    )
    code = (
        "import sys, os, tfrs_embed_command as c\n"
        "os.environ.pop('TF_CPP_MIN_LOG_LEVEL', None)\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.exit(c.main(['info']))"
    )
    said = "E0000 00:00:17.1 1 x.cc:1] failed\nF0000 without an end of line"
    done = outside(code)
    assert (done.returncode, done.stderr) == (1, f"{said}error: 3\n")
    done = outside(code, ABORT="1")
    assert done.returncode < 0
    assert done.stderr == said


# info.


def test_info(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    versions = found["versions"]
    assert versions["tfrs_embed"] == tfrs_embed.__version__
    assert versions["tensorflow imported"] == tf.__version__
    assert versions["numpy"] == np.__version__
    assert found["kernels"]["reason"] == str(kernels.status())
    assert found["cpu"]["cores"] == os.cpu_count()
    assert {"name": "/physical_device:CPU:0", "type": "CPU"} in found["devices"]
    legacy = os.environ.get("TF_USE_LEGACY_KERAS")
    assert found["tf.keras"]["TF_USE_LEGACY_KERAS"] == legacy
    keras = "tf_keras" if legacy in ("1", "true", "True") else "keras"
    assert found["tf.keras"]["package"] == keras
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    version = versions[keras.replace("_", "-")]
    assert re.search(rf"\ntf.keras +{keras} {re.escape(version)} ", text)


def test_info_shows_variables_of_tensorflow_and_of_this_package(
    monkeypatch, capsys
):
    monkeypatch.setenv("TFRS_EMBED_LOOPS", "avx2")
    monkeypatch.setenv("TF_CONFIG", "{}")
    # Other programs' variables, Terraform's among them.
    for name in ("API_TOKEN", "TF_TOKEN_app_terraform_io", "TF_VAR_password"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("TFRS_EMBED_TOKEN", "secret")
    assert main(["info", "--json"]) == 0
    text = capsys.readouterr().out
    assert "secret" not in text and "TOKEN" not in text and "VAR" not in text
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\nenvironment +TFRS_EMBED_LOOPS=avx2\n", text)
    assert re.search(r"\nenvironment +TF_CONFIG=\{\}\n", text)
    assert "secret" not in text and "TOKEN" not in text


def test_info_shows_all_variables_of_this_package(monkeypatch, capsys):
    package = pathlib.Path(tfrs_embed.__file__).parent
    sources = "".join(p.read_text() for p in package.rglob("*.py"))
    names = set(re.findall(r"\"(TFRS_EMBED_[A-Z_]+)\"", sources))
    native = "".join(p.read_text() for p in package.rglob("*.cc"))
    names |= set(re.findall(r"getenv\(\"(\w+)\"", native))
    assert len(names) >= 3
    for name in names:
        monkeypatch.setenv(name, "off")
    assert names <= set(info.gather(os.environ)["environment"])


def test_info_does_not_show_what_the_command_sets(monkeypatch, capsys):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    assert main(["info"]) == 0
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert "TF_CPP_MIN_LOG_LEVEL" not in capsys.readouterr().out


def test_info_without_kernels_devices_or_a_keras(monkeypatch, capsys):
    without = kernels.Status(False, "No kernels: none are compiled.")
    monkeypatch.setattr(kernels, "status", lambda: without)

    class NoKeras:
        @property
        def __name__(self):
            raise ImportError("Keras cannot\nbe imported")

    monkeypatch.setattr(tf, "keras", NoKeras())
    monkeypatch.setattr(info, "_read", lambda path: None)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\nkernels +No kernels: none are compiled\.\n", text)
    assert "Keras cannot be imported" in text
    assert re.search(r"\ninstruction sets +not known\n", text)


# kernels.


def test_the_kernels_status(monkeypatch, capsys):
    status = kernels.Status(True, "Kernels in use: a (avx2).", "a", "avx2")
    monkeypatch.setattr(kernels, "status", lambda: status)
    assert main(["kernels", "status"]) == 0
    assert capsys.readouterr().out == "Kernels in use: a (avx2).\n"
    status = kernels.Status(False, "Kernels are off.")
    assert main(["kernels", "status", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "loaded": False,
        "reason": "Kernels are off.",
        "path": None,
        "loops": None,
        "origin": None,
    }


def test_the_kernels_build(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(files, "find", lambda: tmp_path / "built.so")
    assert main(["kernels", "build"]) == 0
    assert "are built: " in capsys.readouterr().out
    asked = []

    def built(output):
        asked.append(output)
        return output or tmp_path / "new.so"

    monkeypatch.setattr(build, "build", built)
    assert main(["kernels", "build", "--force"]) == 0
    assert f"Built {tmp_path}/new.so\n" in capsys.readouterr().out
    assert main(["kernels", "build", "--output", "here.so"]) == 0
    assert asked == [None, pathlib.Path("here.so")]


@pytest.mark.parametrize(
    "error, said",
    [
        ("No C++ compiler: install g++.", "error: No C++ compiler: install"),
        (
            "g++ -c\nx.cc:1: no",
            "g++ -c\nx.cc:1: no\nerror: the compiler failed",
        ),
    ],
)
def test_kernels_that_can_not_be_built(error, said, monkeypatch, capsys):
    def fail(output):
        raise build.BuildError(error)

    monkeypatch.setattr(build, "build", fail)
    assert main(["kernels", "build", "--force"]) == 1
    assert capsys.readouterr().err.startswith(said)
    assert main(["kernels", "build", "--force", "--if-possible"]) == 0
    assert "No kernels" in capsys.readouterr().out


# checkpoint.


def test_the_checkpoint_command_is_the_old_one(tmp_path, capsys):
    table = tf.Variable(tf.ones([3, 2]))
    path = tf.train.Checkpoint(v=table).write(str(tmp_path / "c"))
    assert main(["checkpoint", "inspect", path]) == 0
    shown = capsys.readouterr().out
    assert command.main(["inspect", path]) == 0
    assert capsys.readouterr().out == shown
    assert main(["checkpoint", "inspect", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err.startswith("error: There is no checkpoint")
    (tmp_path / "c.index").write_bytes(b"")
    assert main(["checkpoint", "inspect", path]) == 1
    err = capsys.readouterr().err
    assert "damaged" in err and err.count("\n") == 1


# limits.

MODEL = {
    "batch_size": 8,
    "optimizer": "adagrad",
    "tables": [
        {"name": "movies", "rows": 60, "dim": 8},
        {"name": "genres", "rows": 5, "dim": 8},
    ],
    "features": [
        {"name": "movie", "table": "movies", "hotness": 1},
        {"name": "seen", "table": "movies", "hotness": 2.5},
        {"name": "genre", "table": "genres", "hotness": 1},
    ],
}


@pytest.fixture
def model(tmp_path):
    """A model's file, for a TensorFlow that knows SparseCores."""
    require_sparse_core_api()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return str(path)


def limits(model, *options):
    return main(
        ["limits", model, "--topology=v6e-4", "--size-threshold=5", *options]
    )


def batch(samples=8, seed=0):
    random = np.random.default_rng(seed)
    splits = np.append(0, np.cumsum(random.integers(0, 4, samples)))
    return {
        "movie": random.integers(0, 60, samples),
        "seen.values": random.integers(0, 60, splits[-1]),
        "seen.row_splits": splits,
        "genre": random.integers(0, 5, [samples, 2]).astype(np.int32),
    }


def expected(batches, safety=1.2):
    movies = tfrs_embed.TableConfig("movies", 60, 8)
    genres = tfrs_embed.TableConfig("genres", 5, 8)
    config = {
        "movie": tfrs_embed.FeatureConfig("movie", movies),
        "seen": tfrs_embed.FeatureConfig("seen", movies),
        "genre": tfrs_embed.FeatureConfig("genre", genres),
    }
    found, report = compute_limits(
        [
            {
                "movie": b["movie"],
                "seen": tf.RaggedTensor.from_row_splits(
                    b["seen.values"], b["seen.row_splits"]
                ),
                "genre": tf.RaggedTensor.from_tensor(b["genre"]),
            }
            for b in batches
        ],
        config,
        "v6e-4",
        "adagrad",
        safety,
        size_threshold=5,
        progress=False,
    )
    return found, report


def test_limits_of_files(model, tmp_path, capsys):
    batches = [batch(seed=i) for i in range(3)]
    for i, each in enumerate(batches):
        np.savez(tmp_path / f"b{i}.npz", **each)
    pattern = str(tmp_path / "b*.npz")
    assert limits(model, "--json", "--batches", pattern) == 0
    found = json.loads(capsys.readouterr().out)
    config, report = expected(batches)
    assert found["config"] == {
        "max_ids_per_table": config.max_ids_per_table,
        "max_unique_ids_per_table": config.max_unique_ids_per_table,
        "max_ids_per_chip_per_sample": config.max_ids_per_chip_per_sample,
    }
    assert report.batches == 3
    text = json.dumps(found["report"])
    assert LimitsReport.from_json(text) == report
    assert found["left_out"] == ["genres"]
    assert limits(model, "--batches", pattern, "--safety=2") == 0
    printed = capsys.readouterr()
    config, report = expected(batches, 2)
    assert printed.out.startswith(f"{report}\n") and not printed.err
    code = printed.out[printed.out.index("tf.tpu.") :]
    assert eval(
        code, {"tf": tf}
    ) == tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(
        max_ids_per_table=config.max_ids_per_table,
        max_unique_ids_per_table=config.max_unique_ids_per_table,
        max_ids_per_chip_per_sample=config.max_ids_per_chip_per_sample,
    )


def test_a_file_may_have_all_chips_batch_or_a_part_of_one(
    model, tmp_path, capsys
):
    whole = batch(32)
    np.savez(tmp_path / "whole.npz", **whole)
    parts = []
    for start in range(0, 32, 8):
        splits = whole["seen.row_splits"][start : start + 9]
        parts.append(
            {
                "movie": whole["movie"][start : start + 8],
                "seen.values": whole["seen.values"][splits[0] : splits[-1]],
                "seen.row_splits": splits - splits[0],
                "genre": whole["genre"][start : start + 8],
            }
        )
    assert limits(model, "--json", f"--batches={tmp_path}/whole.npz") == 0
    found = json.loads(capsys.readouterr().out)
    config, _ = expected(parts)
    assert found["report"]["batches"] == 4
    assert found["config"]["max_ids_per_table"] == config.max_ids_per_table
    # The smaller one may come first.
    np.savez(tmp_path / "a.npz", **batch(3))
    np.savez(tmp_path / "b.npz", **parts[0])
    names = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    assert limits(model, "--json", "--batches", *names) == 0
    assert json.loads(capsys.readouterr().out)["report"]["batches"] == 2


def test_limits_of_drawn_batches(model, capsys):
    assert limits(model, "--json", "--draw=20") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["batches"] == 20
    assert "drawn" in found["source"]
    [movies] = found["report"]["tables"]
    # 20 batches of 8 samples, with 1 and 2.5 ids.
    assert movies["ids"] == pytest.approx(20 * 8 * 3.5, rel=0.1)
    assert limits(model, "--json", "--draw=20", "--seed=0") == 0
    assert json.loads(capsys.readouterr().out) == found
    assert limits(model, "--json", "--draw=20", "--seed=1") == 0
    assert json.loads(capsys.readouterr().out)["report"] != found["report"]


def without(name):
    return {k: v for k, v in batch().items() if k != name}


@pytest.mark.parametrize(
    "arrays, message",
    [
        (without("movie"), "feature 'movie': there must be an array 'movie'"),
        (without("seen.values"), "'seen.values' and 'seen.row_splits'"),
        (batch() | {"seen": [1]}, "feature 'seen': there must be an array"),
        (batch() | {"movie": [60] * 8}, "id 60 is outside table 'movies'"),
        (batch() | {"movie": [-1] * 8}, "id -1 is outside table 'movies'"),
        (batch() | {"movie": [0.5] * 8}, "ids must be integers, got float64"),
        (batch() | {"movie": 3}, r"ids must have the shape .*, got \[\]"),
        (batch() | {"movie": [1] * 7}, "different numbers of samples"),
        (batch() | {"seen.row_splits": [0, 1]}, "seen.row_splits must be"),
        (batch() | {"movie": np.array(["a"], object)}, "can't be read as"),
        (batch(9), "has 9 samples: .* batch_size=8, .* of 4 chips 32"),
        (batch(0), "has 0 samples"),
    ],
)
def test_wrong_files(arrays, message, model, tmp_path, capsys):
    np.savez(tmp_path / "b.npz", **arrays)
    assert limits(model, f"--batches={tmp_path}/b.npz") == 2
    printed = capsys.readouterr()
    assert re.search(message, printed.err), printed.err
    assert f"{tmp_path}/b.npz" in printed.err
    assert printed.err.count("\n") == 1 and not printed.out


def test_what_is_not_read_of_a_file_is_said_once(model, tmp_path, capsys):
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", label=np.ones(8), **batch())
    assert limits(model, f"--batches={tmp_path}/*.npz") == 0
    err = capsys.readouterr().err
    assert err == f"note: not read of '{tmp_path}/a.npz': ['label']\n"


def test_other_wrong_inputs_of_limits(model, tmp_path, capsys):
    for name, content in ("x.npz", b"no"), ("y.npz", b""), ("z[1].npz", b""):
        (tmp_path / name).write_bytes(content)
        assert limits(model, f"--batches={tmp_path}/{name}") == 2
        assert f"{name}' can't be read" in capsys.readouterr().err
    np.save(tmp_path / "one.npy", np.arange(3))
    assert limits(model, f"--batches={tmp_path}/one.npy") == 2
    assert "one array without a name" in capsys.readouterr().err
    assert limits(model, f"--batches={tmp_path}/none*.npz") == 2
    assert "there is no file" in capsys.readouterr().err
    assert limits(model, f"--batches={model}", "--draw=3") == 2
    assert "--draw and --seed" in capsys.readouterr().err
    assert limits(model, "--size-threshold=60") == 2
    assert "No table has more than" in capsys.readouterr().err
    assert limits(f"{tmp_path}/none.json") == 2
    assert "none.json" in capsys.readouterr().err
    for option in ("--safety=0.5", "--safety=nan", "--draw=0", "--seed=-1"):
        with pytest.raises(SystemExit) as end:
            limits(model, option)
        assert end.value.code == 2
        assert option.partition("=")[0] in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["limits", model, "--topology=v9-8"])
    assert "Unknown TPU slice 'v9-8'" in capsys.readouterr().err

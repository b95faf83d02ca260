"""`tfrs-embed`: its help, its exit statuses, and commands of its own."""

import argparse
import importlib
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
from tfrs_embed.compat import version
from tfrs_embed.kernels import build, files
from tfrs_embed.tools.commands import info
from tfrs_embed_command import main, make_parser

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
    if path:
        yield path, parser


COMMANDS = dict(leaves(make_parser()))


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
    for path in COMMANDS:
        assert f"    {path[0]}" in shown


def test_each_commands_help_has_an_example_and_exit_statuses():
    assert ("checkpoint", "convert") in COMMANDS
    for path, parser in {(): make_parser(), **COMMANDS}.items():
        text = parser.format_help()
        assert tfrs_embed_command.EXIT_STATUS in text, path
        assert f"  tfrs-embed {' '.join(path)}".rstrip() in text, path
        assert all(len(line) <= 80 for line in text.splitlines()), path


def test_each_command_has_its_module():
    """Help and wrong arguments don't import it."""
    for path, parser in COMMANDS.items():
        # Of `checkpoint` all commands have one.
        run = parser.get_default("run") or COMMANDS[path[:1]].get_default("run")
        assert run or path == ("kernels",)
        if run:
            module, _, function = run.partition(":")
            assert callable(getattr(importlib.import_module(module), function))


def test_what_it_says_of_itself_needs_no_tensorflow():
    helps = [[*path, "--help"] for path in [(), *COMMANDS]]
    wrong = [
        ["nothing"],
        ["info", "--nothing"],
        ["kernels", "nothing"],
        ["checkpoint", "convert", "a", "b", "--step", "-1"],
        ["tpu-check", "a.py"],
    ]
    done = outside(
        "import sys, tfrs_embed_command as c\n"
        "assert c.main([]) == 0\n"
        f"for arguments in [*{helps}, ['--version'], *{wrong}]:\n"
        "    try:\n"
        "        c.main(arguments)\n"
        "    except SystemExit as end:\n"
        "        print(arguments, end.code)\n"
        "assert not {'tensorflow', 'tfrs_embed', 'numpy'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    assert f"tfrs-embed {tfrs_embed.__version__}\n" in done.stdout
    for arguments in [*helps, ["--version"]]:
        assert f"{arguments} 0\n" in done.stdout
    for arguments in wrong:
        assert f"{arguments} 2\n" in done.stdout
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
        "kernels status",
    ],
)
def test_a_reader_may_have_read_enough(line, monkeypatch, tmp_path, capsys):
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


def test_only_tpu_check_passes_arguments_on(monkeypatch):
    assert COMMANDS["tpu-check",].get_default("arguments") == []
    given = {}

    def run(args):
        given.update(vars(args))
        return 0

    monkeypatch.setattr(tfrs_embed.tpu_check.command, "run", run)
    assert main(["tpu-check", "a.py", "--topology=v5p-8", "--", "-x"]) == 0
    assert given["arguments"] == ["-x"]
    assert main(["tpu-check", "a.py", "--topology=v5p-8"]) == 0
    assert given["arguments"] == []


def test_a_slice_that_does_not_exist_is_2(capsys):
    assert main(["tpu-check", __file__, "--topology", "v9-8"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --topology: Unknown TPU slice 'v9-8'")


# The wheels for TPUs.


@pytest.mark.parametrize(
    "versions, status, message",
    [
        ({"tensorflow-tpu": "2.20.0"}, 0, ""),
        ({"tensorflow": "2.21.0", "libtpu": "0.0.52"}, 0, ""),
        ({"tensorflow-tpu": "2.20.0", "libtpu": "0.0.31"}, 0, ""),
        (
            {"tensorflow-tpu": "2.20.0", "libtpu": "0.0.32.1"},
            1,
            "error: tensorflow-tpu 2.20.0 aborts with libtpu 0.0.32.1 when it "
            "is imported: pip install libtpu==0.0.20. docs/tpu.md",
        ),
        (
            {"tensorflow": "2.21.0", "tensorflow-tpu": "2.20.0"},
            0,
            "warning: tensorflow 2.21.0 and tensorflow-tpu 2.20.0 are both "
            "installed",
        ),
    ],
)
def test_wheels_are_checked_before_tensorflow_is_imported(
    versions, status, message, tmp_path
):
    for name, number in versions.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{number}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        (folder / "METADATA").write_text(text)
    # TensorFlow is not imported: there is none on the path.
    done = outside(
        "import importlib, sys, types\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "import tfrs_embed_command as c\n"
        "status = c.main(['info'])\n"
        "assert 'tensorflow' not in sys.modules\n"
        "sys.exit(status)",
    )
    lines = done.stderr.splitlines()
    if status == 0:  # Then the import is tried.
        assert "No module named" in lines.pop()
    assert lines == [] if not message else lines[0].startswith(message)


def test_documents_have_the_tested_wheels():
    page = (ROOT / "docs/tpu.md").read_text("utf-8")
    assert f"tensorflow-tpu=={version.TENSORFLOW_TPU}" in page
    assert f"libtpu=={version.LIBTPU}" in page
    assert f"0.0.14 to {version.NEWEST_LIBTPU}" in page
    wheels = (ROOT / "tests/tpu_wheel/wheels.txt").read_text("utf-8")
    assert f"tensorflow-tpu=={version.TENSORFLOW_TPU}" in wheels


# info.


def test_info(capsys):
    assert main(["info"]) == 0
    found = json.loads(capsys.readouterr().out)
    versions = found["versions"]
    assert versions["tfrs_embed"] == tfrs_embed.__version__
    assert versions["tensorflow imported"] == tf.__version__
    assert versions["numpy"] == np.__version__
    assert found["kernels"]["reason"] == str(kernels.status())
    assert found["cpu"]["cores"] == os.cpu_count()
    assert found["memory"] > 0
    assert {"name": "/physical_device:CPU:0", "type": "CPU"} in found["devices"]
    legacy = os.environ.get("TF_USE_LEGACY_KERAS")
    assert found["tf.keras"]["TF_USE_LEGACY_KERAS"] == legacy
    keras = "tf_keras" if legacy in ("1", "true", "True") else "keras"
    assert found["tf.keras"]["package"] == keras


def test_info_shows_variables_of_tensorflow_and_of_this_package(
    monkeypatch, capsys
):
    monkeypatch.setenv("TFRS_EMBED_LOOPS", "avx2")
    monkeypatch.setenv("TF_CONFIG", "{}")
    # Other programs' variables, Terraform's among them.
    for name in ("API_TOKEN", "TF_TOKEN_app_terraform_io", "TF_VAR_password"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("TFRS_EMBED_TOKEN", "secret")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "secret" not in text and "TOKEN" not in text and "VAR" not in text
    shown = json.loads(text)["environment"]
    assert (shown["TFRS_EMBED_LOOPS"], shown["TF_CONFIG"]) == ("avx2", "{}")


def test_info_shows_all_variables_of_this_package(monkeypatch):
    package = pathlib.Path(tfrs_embed.__file__).parent
    sources = "".join(p.read_text() for p in package.rglob("*.py"))
    names = set(re.findall(r"\"(TFRS_EMBED_[A-Z_]+)\"", sources))
    native = "".join(p.read_text() for p in package.rglob("*.cc"))
    names |= set(re.findall(r"getenv\(\"(\w+)\"", native))
    assert len(names) >= 3
    for name in names:
        monkeypatch.setenv(name, "off")
    assert names <= set(info.gather(os.environ)["environment"])


def test_info_does_not_show_the_log_level_that_the_command_sets(
    monkeypatch, capsys
):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    assert main(["info"]) == 0
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert "TF_CPP_MIN_LOG_LEVEL" not in capsys.readouterr().out


def test_info_without_devices_or_a_keras(monkeypatch, capsys):
    class NoKeras:
        @property
        def __name__(self):
            raise ImportError("Keras cannot be imported")

    monkeypatch.setattr(tf, "keras", NoKeras())
    monkeypatch.setattr(info, "_cpuinfo", dict)
    assert main(["info"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tf.keras"]["error"] == "Keras cannot be imported"
    assert found["cpu"]["instruction_sets"] == []


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
    monkeypatch.setattr(files, "find_build", lambda: tmp_path / "built.so")
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


def test_a_build_is_installed_without_following_links(tmp_path):
    """The name of the copy could be known: it had the process's number."""
    result, place, victim = (tmp_path / n for n in ("built", "a.so", "victim"))
    result.write_text("kernels")
    victim.write_text("mine")
    place.symlink_to(victim)
    place.with_name(f"a.so.{os.getpid()}").symlink_to(victim)
    assert build._install(result, place) == place
    assert not place.is_symlink() and place.read_text() == "kernels"
    assert victim.read_text() == "mine"
    with pytest.raises(build.BuildError, match=r"Can't write .*built/a.so"):
        build._install(result, result / "a.so")


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


def test_the_checkpoint_command(tmp_path, capsys):
    table = tf.Variable(tf.ones([3, 2]))
    path = tf.train.Checkpoint(v=table).write(str(tmp_path / "c"))
    assert main(["checkpoint", "inspect", path]) == 0
    assert "no tables" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err.startswith("error: There is no checkpoint")
    (tmp_path / "c.index").write_bytes(b"")
    assert main(["checkpoint", "inspect", path]) == 1
    err = capsys.readouterr().err
    assert "damaged" in err and err.count("\n") == 1


# Files that anybody may have written.

BYTES = {
    "empty": b"",
    "zeros": bytes(1000),
    "binary": bytes(range(256)) * 9,
    "no UTF-8": b'\xff\xfe{"a": 1}',
    "deep": b"[" * 200_000,
    "null": b"null",
    "long number": b"1" * 5000,
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(90),
    "ZIP": b"PK\3\4" + bytes(90),
    "an archive's end": b"PK\5\6" + bytes(18),
    "a folder": None,
}
SUFFIXES = ("", ".json", ".index", ".keras", ".weights.h5", ".py")


@pytest.mark.parametrize("content", BYTES)
def test_files_of_anybody_end_in_one_line_of_an_error(
    content, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    def write(path):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if BYTES[content] is None:
            os.mkdir(path)
        else:
            pathlib.Path(path).write_bytes(BYTES[content])

    files = [f"a{suffix}" for suffix in SUFFIXES]
    for each in (
        *files,
        "log/tables.jsonl",
        "run/checkpoint",
        *("model/saved_model.pb", "model/variables/variables.index"),
        *("sok-1/v_keys.file", "sok-1/v_values.file"),
        *("sok-2/v-key", "sok-2/v-weight"),
    ):
        write(each)
    sources = [*files, "log", "run", "model", "sok-1", "sok-2", "a\0b"]
    capsys.readouterr()
    for path in sources:
        for arguments in (
            ["checkpoint", "inspect", path],
            ["checkpoint", "convert", path, "out/new"],
            ["checkpoint", "compact", path, "out/new"],
            ["report", path],
            ["tpu-check", path, "--topology", "v5p-8"],
        ):
            if arguments[0] == "tpu-check" and not path.endswith(".py"):
                continue  # It runs anything.
            status, err = main(arguments), capsys.readouterr().err
            # SOK's files of SOK 1 have no format: any numbers are theirs.
            if path == "sok-1" and status == 0:
                pathlib.Path("report.html").unlink(missing_ok=True)
                continue
            assert status in (1, 2), arguments
            *script, last = err.splitlines()
            assert last.startswith("error: "), err
            assert arguments[0] == "tpu-check" or not script, err
    assert not [*tmp_path.glob("out/*"), *tmp_path.glob("report.html")]

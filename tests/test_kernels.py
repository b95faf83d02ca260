"""Whether the compiled kernels are found, loaded, used and compiled."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from tfrs_embed import kernels, progress
from tfrs_embed.kernels import build, files
from training_helpers import ON_GPU, differentiate


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, the only one that builds are looked for in."""
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    monkeypatch.setattr(files, "FROM_WHEEL", tmp_path / "from_wheel")
    monkeypatch.delenv("TFRS_EMBED_KERNELS", raising=False)
    return tmp_path


@pytest.fixture
def unloaded(monkeypatch):
    """Looks for a build again in every call."""
    monkeypatch.setattr(kernels, "_load", kernels._load.__wrapped__)


def assert_works():
    """A table is looked up and trained, with kernels or without."""
    table = tfrs_embed.TableConfig("t", 4, 2, initializer="zeros")
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("f", table),
        tf.tpu.experimental.embedding.SGD(0.5),
        size_threshold=0,
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1, 1, 3])))
    differentiate(tape, loss, layer.trainable_variables)
    np.testing.assert_array_equal(
        layer.embedding_tables["t"], [[0, 0], [-1, -1], [0, 0], [-0.5, -0.5]]
    )


# What status() says.


def test_a_checkout_without_builds_works_and_says_how_to_build(
    folder, unloaded
):
    status = kernels.status()
    assert not status.loaded
    assert status.path is status.loops is None
    assert "none are compiled" in str(status)
    assert "python -m tfrs_embed.kernels.build" in str(status)
    assert kernels.operations("CPU:0") is None
    assert_works()


def test_a_build_for_another_tensorflow_is_not_loaded(folder, unloaded):
    other = folder / "kernels-tf2.99.0-x86_64-0123456789ab.so"
    other.write_text("")
    status = kernels.status()
    assert not status.loaded
    assert f"this TensorFlow, {tf.__version__} " in str(status)


def test_a_build_of_other_sources_is_not_loaded(folder, unloaded):
    name = files.file_name()
    stem, _, _ = name.rpartition("-")
    (folder / f"{stem}-0123456789ab.so").write_text("")
    assert files.find_build() is None
    assert not kernels.status().loaded


# What a wheel brings.


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The folders of the package and of a wheel's builds."""
    package = tmp_path / "package"
    from_wheel = package / "from_wheel"
    from_wheel.mkdir(parents=True)
    monkeypatch.setattr(files, "FOLDER", package)
    monkeypatch.setattr(files, "FROM_WHEEL", from_wheel)
    monkeypatch.delenv("TFRS_EMBED_KERNELS", raising=False)
    return package, from_wheel


def test_the_packages_own_build_goes_before_a_wheels(wheel):
    package, from_wheel = wheel
    for folder in (from_wheel, package):
        build = folder / files.file_name()
        build.write_text("")
        assert files.find_build() == build


def test_a_wheels_builds_for_other_tensorflows_are_not_loaded(wheel, unloaded):
    _, from_wheel = wheel
    for version in ("2.98.1", "2.98.0"):
        name = f"kernels-tf{version}-x86_64-0123456789ab.so"
        (from_wheel / name).write_text("")
    status = kernels.status()
    assert not status.loaded and status.origin is None
    assert f"this TensorFlow, {tf.__version__} " in str(
        status
    ) and "run python -m tfrs_embed.kernels.build" in str(status)


def test_a_wheels_build_for_another_build_of_this_tensorflow_is_not_loaded(
    wheel, unloaded, monkeypatch
):
    _, from_wheel = wheel
    (from_wheel / files.file_name()).write_text("")
    # As those who compile TensorFlow themselves have it.
    monkeypatch.setattr(tf.version, "GIT_VERSION", "unknown")
    status = kernels.status()
    assert not status.loaded
    assert f"this TensorFlow, {tf.__version__} (unknown)" in str(status)


def test_a_build_is_for_the_macros_that_tensorflow_was_compiled_with(
    wheel, monkeypatch
):
    _, from_wheel = wheel
    (from_wheel / files.file_name()).write_text("")
    flags = tf.sysconfig.get_compile_flags()
    elsewhere = ["-I/elsewhere", *(f for f in flags if f[:2] != "-I")]
    monkeypatch.setattr(tf.sysconfig, "get_compile_flags", lambda: elsewhere)
    assert files.find_build()
    other = [f.replace("CXX11_ABI=1", "CXX11_ABI=0") for f in flags]
    assert other != flags
    monkeypatch.setattr(tf.sysconfig, "get_compile_flags", lambda: other)
    assert files.find_build() is None


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("origin", ["wheel", "compiled"])
def test_the_status_says_where_the_kernels_come_from(
    unloaded, monkeypatch, origin
):
    if origin == "wheel":
        monkeypatch.setattr(files, "FROM_WHEEL", files.find_build().parent)
    status = kernels.status()
    assert status.loaded
    assert status.origin == origin
    said = {"wheel": "came with the wheel", "compiled": "compiled here"}
    assert said[origin] in str(status)


def test_a_build_goes_to_the_packages_folder(
    wheel, tmp_path, monkeypatch, capsys
):
    package, from_wheel = wheel
    linker(tmp_path, monkeypatch)
    (from_wheel / files.file_name()).write_text("")
    assert build.main([]) == 0
    assert f"are built: {from_wheel}" in capsys.readouterr().out
    # The package's folder takes it, and is the first.
    assert build.main(["--force"]) == 0
    assert files.find_build() == package / files.file_name()
    # No folder can be made in a file.
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(files, "FOLDER", tmp_path / "file/x")
    assert build.main(["--force"]) == 1
    assert f"Can't write {tmp_path}/file/x" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not a library"])
def test_a_damaged_build_is_not_used(folder, unloaded, content):
    path = folder / files.file_name()
    path.write_bytes(content)
    status = kernels.status()
    assert not status.loaded
    assert f"{path} does not load" in str(status)
    assert_works()


def test_a_library_without_the_operations_is_not_used(folder, unloaded):
    [library, *_] = pathlib.Path(tf.sysconfig.get_lib()).glob(
        "libtensorflow_framework*"
    )
    (folder / files.file_name()).symlink_to(library)
    assert not kernels.status().loaded


@pytest.mark.parametrize("value", ["off", "OFF", "0"])
def test_the_environment_turns_them_off(unloaded, monkeypatch, value):
    monkeypatch.setenv("TFRS_EMBED_KERNELS", value)
    status = kernels.status()
    assert not status.loaded
    assert "TFRS_EMBED_KERNELS" in str(status)
    assert_works()


# What a layer's placement says.

ELSEWHERE = pytest.mark.skipif(ON_GPU, reason="a GPU has no use for kernels")


def a_layer(size_threshold=0):
    table = tfrs_embed.TableConfig("t", 4, 2)
    return tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("f", table),
        tf.tpu.experimental.embedding.SGD(0.5),
        size_threshold=size_threshold,
    )


@ELSEWHERE
def test_a_placement_says_how_to_get_kernels(folder):
    placement = a_layer().placement
    last = str(placement).splitlines()[-1]
    assert last.startswith("No kernels: none are compiled")
    assert "python -m tfrs_embed.kernels.build" in last
    assert "kernels" not in repr(placement)


@ELSEWHERE
def test_a_placement_says_that_they_are_off(monkeypatch):
    layer = a_layer()
    before = layer.placement
    monkeypatch.setenv("TFRS_EMBED_KERNELS", "off")
    assert "TFRS_EMBED_KERNELS" in str(layer.placement).splitlines()[-1]
    assert layer.placement == before


def test_no_kernels_are_missed_where_none_would_be_used(folder):
    placement = a_layer(size_threshold=None).placement
    assert placement.missing_kernels is None
    assert "ernels" not in str(placement)


@pytest.mark.usefixtures("needs_kernels")
def test_a_placement_misses_no_kernels_that_are_there():
    assert a_layer().placement.missing_kernels is None


@pytest.mark.more
def test_asking_for_missing_kernels_starts_no_devices(folder):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import tensorflow as tf\n"
            "from tfrs_embed import kernels\n"
            "kernels.missing()\n"
            "[cpu] = tf.config.list_physical_devices('CPU')\n"
            "tf.config.set_logical_device_configuration(\n"
            "    cpu, [tf.config.LogicalDeviceConfiguration()] * 2)\n"
            "assert len(tf.config.list_logical_devices('CPU')) == 2\n",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("needs_kernels")
def test_in_use_they_are_named_with_their_file():
    status = kernels.status()
    assert status.path == str(files.find_build())
    assert status.path in str(status) and status.loops in str(status)
    assert_works()


@pytest.mark.usefixtures("needs_kernels")
def test_disabled_leaves_them_unused_inside_only():
    def used():
        return kernels.operations("CPU:0") is not None

    assert used()
    with kernels.disabled():
        assert not used()
        with kernels.disabled():
            assert not used()
        assert not used()
    assert used()


@pytest.mark.usefixtures("needs_kernels")
def test_only_rows_on_a_cpu_use_them():
    cpu = "/job:worker/replica:0/task:0/device:CPU:0"
    assert kernels.operations(cpu) is not None
    assert kernels.operations("/GPU:0") is None


# Compiling.


def test_without_a_compiler_building_fails_and_says_what_is_missing(
    folder, monkeypatch, capsys
):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert build.main([]) == 1
    assert "CXX is '/nonexistent/c++'" in capsys.readouterr().err
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(folder))
    assert build.main([]) == 1
    assert "install g++" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_if_possible_succeeds_without_a_compiler(folder, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert build.main(["--if-possible"]) == 0
    assert "TensorFlow's operations" in capsys.readouterr().out


def test_a_compilers_error_is_shown(folder, monkeypatch, capsys):
    failing = folder / "c++"
    failing.write_text("#!/bin/sh\necho 'no such standard' >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    assert build.main([]) == 1
    assert "no such standard" in capsys.readouterr().err


def linker(folder, monkeypatch):
    """A compiler that makes empty files at once."""
    script = folder / "c++"
    script.write_text('#!/bin/sh\nfor last; do :; done\necho > "$last"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def test_compiling_shows_what_is_done_and_the_time_left(
    folder, monkeypatch, capsys
):
    linker(folder, monkeypatch)
    for name in ("_AFTER_S", "_LINE_EVERY_S"):
        monkeypatch.setattr(progress, name, 0)
    assert build.main([]) == 0
    *states, last = capsys.readouterr().err.splitlines()
    assert all(
        re.fullmatch(
            r"Compiling the kernels: \d+% of \d files, .* a (second|minute), "
            r"0:00:\d\d left",
            state,
        )
        for state in states
    )
    [count] = re.findall(r"^Compiling the kernels: done, (\d) files in", last)
    assert f"100% of {count} files" in states[-1]


def test_a_build_replaces_those_of_older_sources_only(folder, monkeypatch):
    linker(folder, monkeypatch)
    stem, _, _ = files.file_name().rpartition("-")
    older = folder / f"{stem}-0123456789ab.so"
    other = folder / "kernels-tf2.99.0-x86_64-0123456789ab.so"
    older.write_text("")
    other.write_text("")
    assert build.main([]) == 0
    assert sorted(p.name for p in folder.glob("*.so")) == sorted(
        [files.file_name(), other.name]
    )


def test_what_is_built_is_not_built_again(folder, monkeypatch, capsys):
    (folder / files.file_name()).write_text("")
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert build.main([]) == 0
    assert build.main(["--force"]) == 1


def test_a_build_goes_where_output_says(folder, monkeypatch):
    linker(folder, monkeypatch)
    inside = folder / "inside"
    inside.mkdir()
    assert build.main(["--output", str(inside)]) == 0
    assert build.main(["--output", str(folder / "given.so")]) == 0
    assert [p.name for p in inside.iterdir()] == [files.file_name()]
    assert (folder / "given.so").is_file()


# What the sources name, and the header that has it; or C's, which the loops
# alone use.
HEADERS = {
    r"std::(min|max|clamp|sort|stable_sort|unique|copy|copy_n|fill_n|count|is_sorted|"
    r"all_of|any_of|none_of|binary_search|remove|lower_bound|upper_bound|"
    r"inplace_merge|nth_element|partition|push_heap|pop_heap)\b": [
        "<algorithm>"
    ],
    r"std::(runtime_error|invalid_argument)\b": ["<stdexcept>"],
    r"\bstrerror\b": ["<cstring>", "<string.h>"],
    r"std::array\b": ["<array>"],
    r"std::(atomic|memory_order_relaxed)\b": ["<atomic>"],
    r"std::condition_variable\b": ["<condition_variable>"],
    r"\bsize_t\b": ["<cstddef>", "<stddef.h>"],
    r"\bu?int(8|16|32|64|ptr)_t\b": ["<cstdint>", "<stdint.h>"],
    r"\bgetenv\b|std::(calloc|free)\b": ["<cstdlib>"],
    r"std::deque\b": ["<deque>"],
    r"std::exception\b": ["<exception>"],
    r"std::(bad_alloc|nothrow)\b": ["<new>"],
    r"\b(mem(cpy|set|move|cmp)|str(cmp|len))\b": ["<cstring>", "<string.h>"],
    r"std::function\b": ["<functional>"],
    r"std::numeric_limits\b": ["<limits>"],
    r"\bsqrtf?\(|std::(pow|expm1|log1p)\b": ["<cmath>", "<math.h>"],
    r"std::(unique_ptr|shared_ptr|make_shared|make_unique|"
    r"enable_shared_from_this)\b": ["<memory>"],
    r"std::(mutex|lock_guard|unique_lock)\b": ["<mutex>"],
    r"std::(iota|accumulate)\b": ["<numeric>"],
    r"std::(string|to_string)\b": ["<string>"],
    r"std::(thread|this_thread)\b": ["<thread>"],
    r"std::(tie|tuple)\b": ["<tuple>"],
    r"std::(make_unsigned|enable_if|is_same)": ["<type_traits>"],
    r"std::unordered_set\b": ["<unordered_set>"],
    r"std::(move|swap|exchange|pair|forward)\b": ["<utility>"],
    r"std::vector\b": ["<vector>"],
    r"\bmadvise\b": ["<sys/mman.h>"],
    r"absl::StrCat\b": ['"absl/strings/str_cat.h"'],
    r"absl::StartsWith\b": ['"absl/strings/match.h"'],
    r"absl::string_view\b": ['"absl/strings/string_view.h"'],
    r"absl::(Ok)?Status\b": ['"absl/status/status.h"'],
}


def includes(text):
    return re.findall(r"^#include (\S+)", text, re.MULTILINE)


def test_sources_include_what_they_use():
    sources = [p for p in files.SOURCES.iterdir() if p.suffix in (".cc", ".h")]
    assert sources
    # What the files of operations have in common.
    in_common = set(includes((files.SOURCES / "op.h").read_text()))
    missing = []
    for source in sources:
        text = source.read_text()
        included = set(includes(text))
        if '"op.h"' in included:
            included |= in_common
        code = re.sub(r"//.*", "", text)
        named = set(re.findall(r"\b(?:std|absl)::\w+", code))
        known = {n for n in named if any(re.search(h, n) for h in HEADERS)}
        assert known == named, f"{source.name}: no header is known here"
        missing += [
            (source.name, headers[0])
            for used, headers in HEADERS.items()
            if re.search(used, code) and not included & set(headers)
        ]
    assert missing == []


@pytest.mark.more
def test_importing_needs_no_compiler_and_loads_nothing(tmp_path):
    package = tmp_path / "tfrs_embed"
    shutil.copytree(
        pathlib.Path(tfrs_embed.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("*.so", "__pycache__", "compiled"),
    )
    code = (
        "import tfrs_embed; from tfrs_embed import kernels; "
        "print(kernels.__file__, kernels._load.cache_info().currsize, "
        "kernels.status())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": str(tmp_path),
            "PYTHONPATH": str(tmp_path),
            "TFRS_EMBED_KERNELS": "",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    where, loaded, status = done.stdout.split(maxsplit=2)
    assert where == str(package / "kernels" / "__init__.py")
    assert loaded == "0"
    assert status.startswith("No kernels: none are compiled")


@pytest.mark.usefixtures("needs_kernels")
def test_weighted_ragged_ids_are_looked_up_in_a_function_that_is_exported():
    """Where nothing is trained, so that the graph has a call for either."""
    table = tfrs_embed.TableConfig("table", 20, 4, combiner="sum")
    layer = tfrs_embed.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("x", table), "sgd", size_threshold=0
    )
    ids = tf.ragged.constant([[1, 2, 3], [], [5]])
    weights = tf.ragged.constant([[1.0, 2.0, 3.0], [], [0.5]])
    outputs = tf.function(layer)(ids, weights=weights)
    rows = layer.embedding_tables["table"].numpy()
    expected = [rows[[1, 2, 3]].T @ [1, 2, 3], np.zeros(4), rows[5] / 2]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)

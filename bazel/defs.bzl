"""Build macros of this project."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_test(name, srcs, data = [], deps = [], **kwargs):
    """A py_test that runs `srcs`, files of its own package, with pytest.

    Args:
      name: the target's name.
      srcs: the test files.
      data: other files that the tests need.
      deps: libraries that the tests import.
      **kwargs: passed on to py_test.
    """
    py_test(
        name = name,
        srcs = srcs + ["//bazel:pytest_main.py"],
        args = ["$(location %s)" % src for src in srcs],
        # pytest's settings are in pyproject.toml.
        data = data + srcs + ["//:pyproject.toml"],
        # Otherwise Bazel makes the tests' folder a package, where they can't
        # import their helpers as they do under plain pytest.
        legacy_create_init = 0,
        main = "//bazel:pytest_main.py",
        deps = deps + ["//:expect_pytest_installed"],
        **kwargs
    )

def _compiled_kernels_impl(ctx):
    folder = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run(
        executable = ctx.executable.builder,
        arguments = ["--if-possible", "--output", folder.path],
        outputs = [folder],
        mnemonic = "CompileKernels",
        progress_message = "Compiling the kernels for the CPU",
        # The compiler, and the Python with TensorFlow, are those on PATH.
        use_default_shell_env = True,
        execution_requirements = {"no-remote": "1"},
    )
    return [DefaultInfo(
        files = depset([folder]),
        runfiles = ctx.runfiles([folder]),
    )]

compiled_kernels = rule(
    implementation = _compiled_kernels_impl,
    attrs = {
        "builder": attr.label(
            cfg = "exec",
            doc = "What compiles them: tfrs_embed/kernels/build.py.",
            executable = True,
        ),
    },
    doc = "A folder, named as the target, with the kernels of tfrs_embed.",
)

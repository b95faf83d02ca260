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

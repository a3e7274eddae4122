"""What is built: the wheel works where it is installed, and the sdist holds its own tests."""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest
from oracle import BACKEND
from processes import environment

import kmp

pytestmark = pytest.mark.slow
on_one_backend = pytest.mark.only("jax")  # these tests are about files

ROOT = pathlib.Path(__file__).parents[1]
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2])
"""
# What a checkout has beside the files of the project.
OTHER = (".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", "logs", ".*_cache")


def run(*command, cwd, **variables):
    outside = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**outside, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def files_of(directory):
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist's archive, and the names of all files that it was built from."""
    tree = tmp_path_factory.mktemp("build") / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*OTHER))
    sources = files_of(tree)
    run(sys.executable, "-c", BUILD, "sdist", "dist", cwd=tree)
    (archive,) = (tree / "dist").iterdir()
    return archive, sources


@pytest.fixture(scope="module")
def sdist(built, tmp_path_factory):
    """The unpacked sdist, and the names of all files that it was built from."""
    archive, sources = built
    home = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as packed:
        # Python 3.11.2, which Debian 12 has, knows no filters yet.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(home, **safely)
    return home / archive.name.removesuffix(".tar.gz"), sources


@pytest.fixture(scope="module")
def wheel(sdist):
    """Built from the sdist, as an index's users without a wheel would."""
    unpacked, _ = sdist
    run(sys.executable, "-c", BUILD, "wheel", "dist", cwd=unpacked)
    (path,) = (unpacked / "dist").iterdir()
    return path


@pytest.fixture(scope="module", params=["wheel", pytest.param("sdist", marks=on_one_backend)])
def installed(request, built, wheel, tmp_path_factory):
    """The programs of an environment with one of the files; this one has what it requires."""
    package = {"wheel": wheel, "sdist": built[0]}[request.param]
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    programs = home / ("Scripts" if os.name == "nt" else "bin")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = pathlib.Path(run(programs / "python", "-c", where, cwd=home).strip())
    (own / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    run(*pip, "--quiet", *offline, package, cwd=home)
    return programs


@on_one_backend
def test_the_sdist_holds_every_file(sdist):
    unpacked, sources = sdist
    assert sorted(sources - files_of(unpacked)) == []


@on_one_backend
def test_tests_of_the_sdist_run(sdist):
    unpacked, _ = sdist
    names = ["tests/precision/test_float_formats.py", "tests/cli/test_equivalence.py"]
    said = run(sys.executable, "-m", "pytest", *names, cwd=unpacked, PYTHONPATH=str(unpacked))
    assert "[100%]" in said


@on_one_backend
def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"kmp", f"kmp-{kmp.__version__}.dist-info"}
    assert "kmp/py.typed" in names


@on_one_backend
def test_the_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    facts = email.message_from_string(archive.read(name).decode())
    assert facts["License-Expression"] == "Apache-2.0" and facts["License-File"] == "LICENSE"
    assert "mixed precision" in facts["Keywords"].split(",")
    assert "Typing :: Typed" in facts.get_all("Classifier")
    assert facts.get_payload() == (ROOT / "README.md").read_text()


TRAINS = """
import keras, numpy as np, kmp
keras.config.set_dtype_policy("mixed_float16")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(kmp.scaled("sgd", loss_scale=8.0), "mse")
model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
kmp.audit(model), kmp.debug.diagnose
print(keras.backend.backend(), int(model.optimizer.iterations), kmp.__file__)
"""


def test_both_files_work_where_they_are_installed(installed, tmp_path):
    assert run(installed / "kmp", "--version", cwd=tmp_path) == f"kmp {kmp.__version__}\n"
    assert "bfloat16" in run(installed / "kmp", "formats", cwd=tmp_path)
    said = run(installed / "python", "-c", TRAINS, cwd=tmp_path)
    backend, steps, path = said.splitlines()[-1].split()
    assert (backend, steps) == (BACKEND, "1")
    assert installed.parent in pathlib.Path(path).parents

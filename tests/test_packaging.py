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
from processes import environment

import kmp

pytestmark = [pytest.mark.slow, pytest.mark.only("jax")]

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
def sdist(tmp_path_factory):
    """The unpacked sdist, and the names of all files that it was built from."""
    tree = tmp_path_factory.mktemp("build") / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*OTHER))
    sources = files_of(tree)
    run(sys.executable, "-c", BUILD, "sdist", "dist", cwd=tree)
    (archive,) = (tree / "dist").iterdir()
    with tarfile.open(archive) as packed:
        packed.extractall(tree.parent, filter="data")
    return tree.parent / archive.name.removesuffix(".tar.gz"), sources


@pytest.fixture(scope="module")
def wheel(sdist):
    """Built from the sdist, as an index's users without a wheel would."""
    unpacked, _ = sdist
    run(sys.executable, "-c", BUILD, "wheel", "dist", cwd=unpacked)
    (path,) = (unpacked / "dist").iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The programs of an environment with the wheel; what it requires comes from this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    programs = home / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install"]
    run(*pip, "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = pathlib.Path(run(programs / "python", "-c", where, cwd=home).strip())
    (own / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def test_the_sdist_holds_every_file(sdist):
    unpacked, sources = sdist
    assert sorted(sources - files_of(unpacked)) == []


def test_tests_of_the_sdist_run(sdist):
    unpacked, _ = sdist
    names = ["tests/precision/test_float_formats.py", "tests/cli/test_equivalence.py"]
    said = run(sys.executable, "-m", "pytest", *names, cwd=unpacked, PYTHONPATH=str(unpacked))
    assert "[100%]" in said


def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"kmp", f"kmp-{kmp.__version__}.dist-info"}
    assert "kmp/py.typed" in names


def test_the_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    facts = email.message_from_string(archive.read(name).decode())
    assert facts["License-Expression"] == "Apache-2.0" and facts["License-File"] == "LICENSE"
    assert "mixed precision" in facts["Keywords"].split(",")
    assert "Typing :: Typed" in facts.get_all("Classifier")
    assert facts.get_payload() == (ROOT / "README.md").read_text()


def test_the_wheel_works_where_it_is_installed(installed, tmp_path):
    assert run(installed / "kmp", "--version", cwd=tmp_path) == f"kmp {kmp.__version__}\n"
    assert "bfloat16" in run(installed / "kmp", "formats", cwd=tmp_path)
    program = "import kmp; print(kmp.__file__); kmp.scaled('adam'); kmp.audit, kmp.debug.diagnose"
    path = pathlib.Path(run(installed / "python", "-c", program, cwd=tmp_path).strip())
    assert installed.parent in path.parents

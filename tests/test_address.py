"""The project's address comes from address.cfg, and is written everywhere by one script."""

import configparser
import json
import pathlib
import re
import runpy
import shutil

import pytest

pytestmark = pytest.mark.any_backend

ROOT = pathlib.Path(__file__).parents[1]
REPOSITORY = "https://forge.example/somebody/kmp"


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / "docs" / "address.py"))


@pytest.fixture
def copy(script, tmp_path):
    """The files that have the address, with one that the owner has filled in."""
    for path in [*script["places"](ROOT), ROOT / "address.cfg"]:
        there = tmp_path / path.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
    settings = tmp_path / "address.cfg"
    text = re.sub(
        "^repository =", f"repository = {REPOSITORY}", settings.read_text(), flags=re.MULTILINE
    )
    settings.write_text(text.replace("name = kmp", "name = kmp-keras"))
    return tmp_path


def everything(copy):
    return {path: path.read_text() for path in copy.rglob("*") if path.is_file()}


def test_no_placeholder_is_left(script, copy):
    assert set(script["main"](copy)) == set(script["places"](copy))
    for path, text in everything(copy).items():
        assert "path/to/th" not in text, path
        assert "once kmp is published" not in text, path
    assert "no public address" not in (copy / "docs" / "releasing.md").read_text()


def test_a_second_run_changes_nothing(script, copy):
    script["main"](copy)
    before = everything(copy)
    assert script["main"](copy) == []
    assert everything(copy) == before


def test_the_readme_leads_somewhere_on_the_index_and_the_site(script, copy):
    script["main"](copy)
    text, own = (copy / "README.md").read_text(), (ROOT / "README.md").read_text()
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", text) == []
    assert f"({REPOSITORY}/raw/main/docs/tensorboard.png)" in text
    assert f"({REPOSITORY}/blob/main/docs/limits.md)" in text
    assert "pip install 'kmp-keras[jax,tensorboard]'" in text
    links = re.findall(r"\]\([^)]*\)", own)
    assert re.findall(r"\]\([^)]*\)", script["relative"](text, copy)) == links


def test_the_metadata_have_it(script, copy):
    script["main"](copy)
    parser = configparser.ConfigParser()
    parser.read(copy / "setup.cfg")
    urls = dict(line.split(" = ") for line in parser["metadata"]["project_urls"].split("\n")[1:])
    assert urls["Source"] == REPOSITORY and urls["Issues"] == f"{REPOSITORY}/issues"
    assert parser["metadata"]["name"] == "kmp-keras"
    assert "kmp-keras[tensorboard]" in parser["options.extras_require"]["examples"]
    assert f"\nrepo_url: {REPOSITORY}\n" in (copy / "mkdocs.yml").read_text()
    assert f"\nrepository-code: {REPOSITORY}\n" in (copy / "CITATION.cff").read_text()


def test_notebooks_stay_notebooks_and_install_from_the_index(script, copy):
    script["main"](copy)
    for path in (copy / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        first = next("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        assert first.startswith("# Where kmp is installed this cell does nothing."), path
        assert '%pip install --quiet "kmp-keras[' in first


def test_without_a_repository_nothing_is_written(script, copy, capsys):
    shutil.copy(ROOT / "address.cfg", copy / "address.cfg")
    before = everything(copy)
    if not script["read"](ROOT)["repository"]:
        assert script["main"](copy) == []
        assert everything(copy) == before
        assert "names no repository yet" in capsys.readouterr().out


def test_a_wrong_address_is_refused(script, copy):
    settings = copy / "address.cfg"
    settings.write_text(settings.read_text().replace(REPOSITORY, "somebody/kmp"))
    with pytest.raises(SystemExit, match="must be https"):
        script["main"](copy)

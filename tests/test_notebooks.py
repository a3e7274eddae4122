"""The notebooks: what is stored in them, and that they run."""

import json
import os
import pathlib
import re
import runpy

import pytest
from oracle import BACKEND
from processes import OPTIONAL, environment
from test_examples import RECIPES, check_what_is_printed

pytestmark = pytest.mark.any_backend

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
# What a reader has to find in the outputs, stored or fresh.
WORDS = {
    "quickstart": [r"HEALTHY: loss scale \d+", r"Test accuracy 9\d\.\d%", "conv_1/kernel"],
    "i_have_a_model": [
        r"digits/conv +Conv2D +float32 +mixed_float16",
        r"digits/head +Dense +float32 +float32 +output layer",
        r"output SQNR \d\d\.\d dB",
        r"HEALTHY: loss scale",
    ],
    "my_run_diverged": [
        r"FORWARD-NAN: the loss was not finite",
        r"FORWARD: classifier/energy \(float16\)",
        r"mixed_float16 everywhere but for classifier/energy: output SQNR",
        r"HEALTHY: loss scale 32768, 0 skipped",
    ],
    "which_precision": [
        r"advised policy +(float32|mixed_\w+)",
        r"float16 +6\.55e\+04",
        r"mixed_bfloat16 +9\d\.\d%  HEALTHY",
        r"mixed_float16 +9\d\.\d%  HEALTHY",
    ],
    # The recipes, which notebooks/from_examples.py writes.
    "finetune_language_model": [
        r"HEALTHY: loss scale 1, 0 skipped",
        r"lora: here, 2,508\.9 million parameters: held 5\.05 GB",
    ],
    "finetune_on_a_tpu": [
        r"The first of 8 devices holds [\d,]+ of [\d,]+ bytes",
        r"half, of one chip of 8 here, 0\.1 million parameters: held 0\.\d\d MB",
    ],
    "float16_on_a_t4": [
        r"mixed_float16: 4\d tokens, of which 4\d are padding",
        r"4\d of 4\d tokens are those of float32",
        r"mixed_float16: here, 2,506\.2 million parameters: held 10\.02 GB",
    ],
    "gan": [r"critic: .* 1 of 56 steps skipped", r"mixed_float16: here, 6\.9 million parameters"],
    "custom_loop": [
        r"Largest difference from the weights of fit: 0\.0",
        r"mixed_float16: here, 0\.0 million parameters",
    ],
    "diffusion": [r"HEALTHY: loss scale 32768, 0 skipped", r"mixed_float16: here, \d"],
}
WITHOUT_PICTURES = {
    "finetune_language_model",
    "finetune_on_a_tpu",
    "float16_on_a_t4",
    "custom_loop",
}


def outputs_of(notebook):
    return [out for cell in notebook["cells"] for out in cell.get("outputs", [])]


def check_the_outputs(name, outputs):
    """No error, every word, and a picture. Return all that was printed."""
    assert [out for out in outputs if out["output_type"] == "error"] == []
    said = "".join("".join(out.get("text", "")) for out in outputs)
    assert [word for word in WORDS[name] if not re.search(word, said)] == [], said
    drawn = any("image/png" in out.get("data", {}) for out in outputs)
    assert drawn or name in WITHOUT_PICTURES
    return said


def test_every_notebook_has_its_words():
    assert set(NOTEBOOKS) == set(WORDS)


@pytest.mark.parametrize("name", WORDS)
def test_outputs_are_stored(name):
    notebook = json.loads(NOTEBOOKS[name].read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = outputs_of(notebook)
    check_the_outputs(name, outputs)
    assert [out for out in outputs if out.get("name") == "stderr"] == []
    assert str(pathlib.Path.home()) not in json.dumps(outputs)  # nor where it was made


@pytest.mark.parametrize("name", WORDS)
def test_the_first_cell_installs(name):
    notebook = json.loads(NOTEBOOKS[name].read_text())
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert 'if importlib.util.find_spec("kmp") is None:\n    %pip install' in "".join(
        first["source"]
    )


def test_recipes_are_those_of_the_examples():
    """`make notebooks` writes them again where a script has changed."""
    recipes = runpy.run_path(str(ROOT / "notebooks" / "from_examples.py"))
    assert set(RECIPES) <= set(NOTEBOOKS)
    for name in RECIPES:
        stored = recipes["sources"](json.loads(NOTEBOOKS[name].read_text()))
        assert stored == recipes["cells_of"](name), name


@pytest.mark.slow
@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("name", WORDS)
def test_notebooks_run(name, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    if '" keras-hub' in NOTEBOOKS[name].read_text().replace("\\", ""):
        pytest.importorskip("keras_hub")
    own = environment(needs=OPTIONAL, KERAS_BACKEND=BACKEND, IPYTHONDIR=str(tmp_path))
    own["PYTHONPATH"] = os.pathsep.join([own.get("PYTHONPATH", ""), str(ROOT / "examples")])
    for key, value in own.items():
        monkeypatch.setitem(os.environ, key, value)
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=place).execute()
    printed = check_the_outputs(name, outputs_of(notebook))
    if name in RECIPES:
        check_what_is_printed(f"{name}.py", printed)

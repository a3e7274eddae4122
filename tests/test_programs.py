"""A few of the programs of docs/lab/programs.md; `make programs` runs all of them."""

import importlib.util
import pathlib

import keras
import pytest

COMPAT = pathlib.Path(__file__).parents[1] / "compat"
PACKAGES = {"keras-hub": "keras_hub", "keras-rs": "keras_rs", "BayesFlow": "bayesflow"}

# keras-hub and keras-rs warn of what they do themselves, as when a layer drops a mask.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.only("tensorflow", "jax"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def modules(monkeypatch):
    """What compat consists of, importable as it is for its own processes."""
    monkeypatch.syspath_prepend(COMPAT)
    import catalogue
    import worker

    return catalogue, worker


CELLS = [
    ("graph_attention", "convert"),
    ("graph_attention", "quantize_aware"),
    ("gan", "audit"),
    ("gan", "locate_nonfinite"),
    ("distillation", "file"),
    ("gpt2", "fit"),
    ("gpt2", "convert"),
    ("gpt2", "diagnose"),
    ("efficientnet", "locate_nonfinite"),
    ("efficientnet", "quantize_aware"),
    ("two_towers", "fit"),
    ("ranking", "audit"),
    ("coupling_flow", "diagnose"),
    ("mixtral", "diagnose"),
]


@pytest.mark.parametrize("name, column", CELLS)
def test_a_program_works(name, column, modules):
    catalogue, worker = modules
    package = PACKAGES.get(catalogue.CATALOGUE[name].source)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[programs]', or `make programs`")
    if keras.backend.backend() not in catalogue.program(name).backends:
        pytest.skip("its own train_step is written for another backend")
    state, text = worker.cell(name, column)
    assert state == "works", text


def test_the_page_is_of_the_programs_that_there_are(modules):
    """Each row of the table is in the page, or the page was not written since."""
    catalogue, _ = modules
    page = (COMPAT.parent / "docs" / "lab" / "programs.md").read_text()
    missing = [entry.what for entry in catalogue.CATALOGUE.values() if entry.what not in page]
    assert missing == []

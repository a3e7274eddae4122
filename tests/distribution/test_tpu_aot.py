"""The whole training step, compiled by the TPU's own compiler for four chips, without a TPU.

Nothing runs: this shows what the step compiles to, not how fast it is.
"""

import importlib.util
import pathlib
import re

import pytest
from processes import environment, run_all

HERE = pathlib.Path(__file__).parent
TIMEOUT = 55  # seconds

pytestmark = [
    pytest.mark.only("jax"),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler is not installed: pip install 'kmp[tpu]' (Linux on x86-64)",
    ),
]


def instructions(directory, optimizer, model="images"):
    """How often each instruction occurs in the optimised step with this optimizer, and the text."""
    hlo = directory / "hlo.txt"
    environ = environment(XLA_FLAGS="")
    run_all([[HERE / "tpu_step.py", optimizer, model, hlo]], [environ], directory, TIMEOUT)
    text = hlo.read_text()
    names = re.findall(r"^ +(?:ROOT )?%\S+ = .*? ([a-z][a-z0-9-]*)\(", text, re.MULTILINE)
    return {name: names.count(name) for name in names}, text


def host_transfers(counts, text):
    verbs = ("infeed", "outfeed", "send", "recv")
    return sum(counts.get(verb, 0) for verb in verbs) + text.count("is_host_transfer=true")


def test_the_step_neither_branches_nor_asks_the_host(tmp_path):
    """kmp's optimizer, both layers and the health matrix, in bfloat16, the batch on all chips."""
    counts, text = instructions(tmp_path, "kmp")
    assert counts.get("conditional", 0) == 0
    assert host_transfers(counts, text) == 0
    assert counts.get("custom-call", 0) == 0  # neither a callback nor a library
    assert counts.get("while", 0) == 0
    assert counts["all-reduce"] >= 1  # it is distributed,
    assert "num_partitions=4" in text
    assert re.search(r"bf16\[\S+ (convolution|fusion)\(", text)  # in half precision,
    assert len(re.findall(r"is-finite\(", text)) >= 1  # and checks its gradients


def test_a_watched_step_with_large_variables(tmp_path):
    """A slice of bfloat16 with two strides does not compile there, and a stack would be written."""
    counts, text = instructions(tmp_path, "watched", "words")
    assert counts["conditional"] == 1  # around the table of exponents
    assert host_transfers(counts, text) == 0
    assert "[20000,768]" in text
    assert not re.search(r"\[2,768,768\]", text)


def test_keras_still_branches_on_a_tpu(tmp_path):
    """Two nested conditionals: the device stops to find out which way to go."""
    counts, _ = instructions(tmp_path, "keras")
    assert counts["conditional"] == 2


def test_asking_the_host_would_be_seen(tmp_path):
    counts, text = instructions(tmp_path, "asks_the_host")
    assert host_transfers(counts, text) > 0

"""The README's Python runs as it stands, block after block."""

import contextlib
import io
import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:Step 1. gradient overflow")  # the scale is being found
def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) >= 2
    namespace = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in BLOCKS:
            exec(compile(block, str(README), "exec"), namespace)
    shown, said = (
        re.sub(r"sequential\w*", "sequential", x) for x in (README.read_text(), printed.getvalue())
    )
    assert all(line in shown for line in said.splitlines()[:6])  # of to_mixed_precision
    model, health = namespace["model"], namespace["health"]
    images = namespace["np"].random.default_rng(0).random((4, 8, 8, 1))
    model.fit(images, namespace["np"].arange(4), callbacks=[health], verbose=0)
    assert "float32_output_dense/kernel" in str(health.report)


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()))
def test_links_lead_somewhere(target):
    assert (README.parent / target).exists()

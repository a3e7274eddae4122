"""Every kind of model: convert, predict, fit, save, and load in a new process."""

import json

import keras
import kinds
import numpy as np
import pytest
from oracle import BACKEND
from processes import environment, run_all

import kmp
from kmp._keras import is_graph, layers_of

pytestmark = pytest.mark.slow

# What half precision may cost a small model: two roundings a layer, some ten layers.
TOLERANCE = {"mixed_bfloat16": 20 * 2.0**-8, "mixed_float16": 20 * 2.0**-11}

# Its own constants overflow in float16, with a warning.
NOT_IN_FLOAT16 = {"spectral_normalization"}

# It rescales its kernel and writes it back, which half precision would round.
KEPT_BODIES = {"spectral_normalization": ["SpectralNormalization"]}


def arrays(outputs):
    if isinstance(outputs, dict):
        outputs = [outputs[key] for key in sorted(outputs)]
    return [keras.ops.convert_to_numpy(x) for x in keras.tree.flatten(outputs)]


def dtypes(model):
    """What each layer that computes does it in; Keras does not save it of Functional models."""
    rows = [x for x in layers_of(model) if not isinstance(x, keras.layers.InputLayer)]
    return [[x.name, x.compute_dtype, x.variable_dtype] for x in rows if not is_graph(x)]


def check_numbers(before, after, policy):
    for old, new in zip(arrays(before), arrays(after), strict=True):
        assert new.dtype == "float32"
        difference = np.abs(new - old).max()
        assert 0 < difference <= TOLERANCE[policy] * np.abs(old).max()


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_in_bfloat16(kind):
    convert_and_train(kind, "mixed_bfloat16")


@pytest.mark.parametrize("kind", ["convolutions", "lstm", "subclassed", "normalization", "nested"])
def test_in_float16(kind):
    convert_and_train(kind, "mixed_float16")


def convert_and_train(kind, policy):
    model, x = kinds.KINDS[kind]()
    before, weights = model(x), [w.numpy() for w in model.weights]
    model.compile("adam", "mse")
    report = kmp.to_mixed_precision(model, policy)
    for old, new in zip(weights, model.weights, strict=True):
        assert new.dtype == "float32" and np.array_equal(old, new.numpy())

    half = kmp.Policy(policy).compute_dtype
    bodies = [x for x in layers_of(model) if x.name == "body"]
    parts = [x for each in bodies for x in layers_of(each)]
    kept = [type(x).__name__ for x in parts if x.compute_dtype != half]
    assert parts and kept == KEPT_BODIES.get(kind, [])
    assert {x.compute_dtype for x in layers_of(model) if x.name == "head"} == {"float32"}
    raw = [x for x in layers_of(model) if x.name == "raw"]
    assert all(x.compute_dtype == "float32" for x in raw)
    assert all(report.kept[x.path].startswith("preprocessing") for x in raw)
    check_numbers(before, model(x), policy)

    target = keras.tree.map_structure(lambda y: keras.ops.convert_to_numpy(y) + 1, before)
    model.optimizer.build(model.trainable_variables)  # or TensorFlow traces the step twice
    losses = model.fit(x, target, epochs=2, batch_size=4, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert {w.dtype for w in model.trainable_weights} == {"float32"}
    scaled = isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    if scaled:
        assert int(model.optimizer.iterations) + int(model.optimizer.skipped_steps) == 4


@pytest.mark.only("tensorflow", "torch")  # JAX compiles each operation of each of them anew
@pytest.mark.parametrize("kind", sorted(set(kinds.KINDS) - NOT_IN_FLOAT16))
def test_numbers_in_float16(kind):
    model, x = kinds.KINDS[kind]()
    before = model(x)
    kmp.to_mixed_precision(model, "mixed_float16")
    check_numbers(before, model(x), "mixed_float16")


LOAD = """
import json, pathlib, sys
import keras, kinds, kmp
import numpy as np
from test_kinds import arrays, dtypes

for file in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    expected = json.loads(file.with_suffix(".json").read_text())
    model = keras.models.load_model(file, safe_mode=False)
    assert dtypes(model) == expected, (file.stem, dtypes(model))
    outputs = arrays(model(kinds.KINDS[file.stem]()[1]))
    with np.load(file.with_suffix(".npz")) as saved:
        for i, y in enumerate(outputs):
            assert np.array_equal(y, saved[f"arr_{i}"]), file.stem
    print("loaded", file.stem)
"""


@pytest.mark.only("tensorflow", "torch")  # as above; files are the same code on all backends
def test_all_kinds_come_back_in_a_new_process(tmp_path):
    """Bit-equal outputs and the same dtypes, where the global policy is float32."""
    for name, build in kinds.KINDS.items():
        model, x = build()
        kmp.to_mixed_precision(model, "mixed_bfloat16")
        np.savez(tmp_path / f"{name}.npz", *arrays(model(x)))
        (tmp_path / f"{name}.json").write_text(json.dumps(dtypes(model)))
        model.save(tmp_path / f"{name}.keras")
    program = tmp_path / "load.py"
    program.write_text(LOAD)
    environ = environment(KERAS_BACKEND=BACKEND)
    environ["PYTHONPATH"] += f":{kinds.__file__.rpartition('/')[0]}"
    run_all([[program, tmp_path]], [environ], tmp_path, timeout=300)
    said = (tmp_path / "process_0.log").read_text()
    assert said.count("loaded") == len(kinds.KINDS) >= 22

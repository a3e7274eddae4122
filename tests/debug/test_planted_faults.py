"""60 faults planted by seed into six architectures: found, and those of precision cured."""

import architectures
import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, CURABLE, FAULTS, find, make, plant
from keras import ops
from oracle import few

import kmp

pytestmark = pytest.mark.slow

NUMBER, LOSS_SCALE = 60, 1024.0


def drawn():
    """(architecture, layer, fault): each architecture ten times, each fault fifteen times."""
    random = np.random.default_rng(5)
    faults = random.permutation(np.repeat(list(FAULTS), NUMBER // len(FAULTS)))
    for i, fault in enumerate(faults):
        architecture = list(ARCHITECTURES)[i % len(ARCHITECTURES)]
        yield architecture, str(random.choice(ARCHITECTURES[architecture][2])), str(fault)


CASES = list(drawn())
IDS = [f"{i}-{'-'.join(case)}" for i, case in enumerate(CASES)]
NONFINITE = [pytest.param(*c, id=i) for c, i in zip(CASES, IDS, strict=True) if c[2] != "underflow"]
PRECISION = [pytest.param(*c, id=i) for c, i in zip(CASES, IDS, strict=True) if c[2] in CURABLE]


def test_the_draw_is_what_it_says():
    assert len(CASES) == NUMBER
    assert len(NONFINITE) == len(PRECISION) == 45


@pytest.mark.parametrize("architecture, layer, fault", NONFINITE)
def test_locate_names_the_layer(architecture, layer, fault):
    model, x, y = make(architecture)
    plant(find(model, layer), fault)
    report = kmp.debug.locate_nonfinite(model, x, y, loss_scale=LOSS_SCALE)
    assert report.phase == ("backward" if fault == "gradient" else "forward"), str(report)
    assert report.path.split(" ")[0].split("/")[-1] == layer, str(report)
    assert report.dtype == "float16"
    precision = "left float16" in report.cause
    assert precision == (fault != "nan"), str(report)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_a_fault_nobody_is_blamed(architecture):
    model, x, y = make(architecture)
    report = kmp.debug.locate_nonfinite(model, x, y, loss_scale=LOSS_SCALE)
    assert report.phase is None, str(report)
    diagnosis = kmp.debug.diagnose(model, x, y)
    assert diagnosis.float32_layers == ()
    assert diagnosis.gradients_finite


@pytest.mark.parametrize("architecture, layer, fault", PRECISION)
def test_the_map_of_diagnose_cures(architecture, layer, fault):
    """Under the map, and no earlier, training applies every step and moves the weights."""
    model, x, y = make(architecture)
    plant(find(model, layer), fault)
    diagnosis = kmp.debug.diagnose(model, x, y)
    assert [path.split("/")[-1] for path in diagnosis.float32_layers] == [layer], str(diagnosis)
    assert diagnosis.sqnr >= diagnosis.target_sqnr > diagnosis.sqnr_before or fault == "gradient"
    assert diagnosis.gradients_finite

    for inner in model._flatten_layers():
        inner._dtype_policy = diagnosis.policy[inner.path or ""]
        if inner.name in diagnosis.without_path:
            inner._dtype_policy = keras.DTypePolicy("float32")
    rule = kmp.DynamicLossScale(initial_scale=diagnosis.loss_scale)
    optimizer = kmp.scaled("sgd", rule, learning_rate=1e-3)
    model.compile(optimizer, loss=model.loss, run_eagerly=True)
    before = [ops.copy(v.value) for v in model.trainable_variables]
    model.fit(x, y, batch_size=architectures.BATCH, epochs=3, verbose=0)
    assert int(model.optimizer.skipped_steps) == 0
    for old, variable in zip(before, model.trainable_variables, strict=True):
        new = ops.convert_to_numpy(variable.value)
        assert np.isfinite(new).all()
        if "bias" not in variable.path or architecture == "residual":
            assert (new != ops.convert_to_numpy(old)).any(), variable.path


# All but the LSTM, which Keras cannot build in bfloat16.
OF_HALF_WEIGHTS = [name for name in ARCHITECTURES if name != "lstm"]


@pytest.mark.parametrize("policy", ["bfloat16", "p=bf16,c=f16"])
@pytest.mark.parametrize("architecture", few(OF_HALF_WEIGHTS, "cnn"))
def test_the_tools_work_on_bfloat16_weights(architecture, policy):
    layer = ARCHITECTURES[architecture][2][0]
    model, x, y = make(architecture, kmp.get_policy(policy), kmp.scaled("adam"))
    before = [ops.copy(v.value) for v in model.variables]
    assert kmp.debug.locate_nonfinite(model, x, y, loss_scale=LOSS_SCALE).phase is None
    assert kmp.debug.diagnose(model, x, y).float32_layers == ()
    fewer = 18 if policy == "bfloat16" else 0  # dB: it has three bits less than float16
    assert kmp.debug.compare_precisions(model, x).output_sqnr > 45 - fewer  # one rounding: 56
    assert kmp.debug.memory_report(model, len(x), x)
    for old, variable in zip(before, model.variables, strict=True):
        assert old.dtype == variable.value.dtype
        np.testing.assert_array_equal(*(ops.convert_to_numpy(v) for v in (old, variable.value)))

    plant(find(model, layer), "overflow")
    report = kmp.debug.locate_nonfinite(model, x, y, loss_scale=LOSS_SCALE)
    found = report.path and report.path.split(" ")[0].split("/")[-1]
    assert found == (None if policy == "bfloat16" else layer), str(report)


# What loss scaling cannot cure it must not hide, and what it does cure is no fault any more: the
# scale sinks until the gradients fit.
VERDICTS = {
    "overflow": ["FORWARD-NAN"],
    "nan": ["FORWARD-NAN"],
    # What was lost forward divides by next to nothing backward; a tiny scale may bear that.
    "underflow": ["COLLAPSED", "CALIBRATING"],
    "gradient": ["CALIBRATING"],  # a smaller scale is found, which bears it
}


@pytest.mark.only("torch")  # which has nothing to compile; tests/callbacks has each kind on all
@pytest.mark.filterwarnings("ignore:Step ")
@pytest.mark.parametrize("architecture, layer, fault", CASES[::10], ids=IDS[::10])
def test_gradient_health_gives_the_verdict(architecture, layer, fault):
    model, x, y = make(architecture)
    plant(find(model, layer), fault)
    model.compile(kmp.scaled("sgd", learning_rate=1e-3), loss=model.loss)
    health = kmp.callbacks.GradientHealth()
    x, y = (np.concatenate([batch] * 130) for batch in (x, y))
    model.fit(x, y, batch_size=architectures.BATCH, shuffle=False, verbose=0, callbacks=[health])
    assert health.verdict.state in VERDICTS[fault], str(health.verdict)

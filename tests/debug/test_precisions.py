"""compare_precisions: its columns against runs by hand, and the layer that it names."""

import math

import keras
import numpy as np
import pytest
from architectures import find, make, plant
from keras import layers, ops

import kmp
from kmp.debug import sqnr

pytestmark = pytest.mark.slow

POLICY = "mixed_bfloat16"


@pytest.fixture
def stack():
    """Three layers of which the second loses most of its bits in bfloat16."""
    keras.utils.set_random_seed(0)
    rough = layers.Lambda(lambda x: (x + 100.0) - 100.0, output_shape=lambda s: s, name="rough")
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, name="a"), rough, layers.Dense(2, name="b")],
        name="stack",
    ), np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


def run(model, x, low):
    """The model's layers by hand, those named in `low` in bfloat16, and all their outputs."""
    outputs = []
    for layer in model.layers:
        dtype = "bfloat16" if layer.name in low else "float32"
        x = ops.cast(x, dtype)
        if layer.name == "rough":
            x = (x + 100.0) - 100.0
        else:
            kernel, bias = (ops.cast(w.value, dtype) for w in layer.weights)
            x = ops.add(ops.matmul(x, kernel), bias)
        outputs.append(x)
    return outputs


def test_the_columns_are_what_they_say(stack):
    model, x = stack
    report = kmp.debug.compare_precisions(model, x, policy=POLICY)
    right, low = run(model, ops.array(x), []), run(model, ops.array(x), ["a", "rough", "b"])
    for i, row in enumerate(report.rows):
        name = model.layers[i].name
        assert row.path.split("/")[-1] == name
        assert (row.dtype, row.nonfinite) == ("bfloat16", 0)
        a = ops.convert_to_numpy(right[i])
        b = ops.convert_to_numpy(ops.cast(low[i], "float32"))
        assert row.max_abs == pytest.approx(np.abs(a).max(), rel=1e-6)
        assert row.max_error == pytest.approx(np.abs(a - b).max(), rel=1e-3)
        assert row.max_relative_error == pytest.approx(np.abs((a - b) / a).max(), rel=1e-3)
        assert row.cumulative_sqnr == pytest.approx(sqnr(a, b), abs=0.01)
        only = run(model, ops.array(x), [name])
        assert row.output_sqnr == pytest.approx(sqnr(right[-1], only[-1]), abs=0.01)
        assert row.local_sqnr == pytest.approx(sqnr(right[i], only[i]), abs=0.01)
    assert report.output_sqnr == pytest.approx(sqnr(right[-1], low[-1]), abs=0.01)
    assert report.gradient_sqnr == {}


def test_local_and_output_noise_name_the_layer_and_cumulative_noise_does_not(stack):
    model, x = stack
    report = kmp.debug.compare_precisions(model, x, policy=POLICY)
    assert report.worst(1) == [report.rows[1].path]
    a, rough, b = report.rows
    assert rough.local_sqnr < min(a.local_sqnr, b.local_sqnr) - 20
    assert b.cumulative_sqnr < a.cumulative_sqnr - 15  # it is innocent


def test_both_runs_begin_in_the_same_state():
    """The second call of a stateful layer is not that of the first."""
    rnn = layers.SimpleRNN(3, stateful=True, unroll=True, name="rnn")
    model = keras.Sequential([keras.Input(batch_shape=(2, 3, 4)), rnn])
    row = kmp.debug.compare_precisions(model, np.ones((2, 3, 4)), policy=POLICY).rows[0]
    assert min(row.cumulative_sqnr, row.local_sqnr, row.output_sqnr) > 30


def test_gradients(stack):
    model, x = stack
    model.compile("sgd", loss="mse")
    report = kmp.debug.compare_precisions(model, x, np.ones((16, 2)), policy=POLICY)
    assert list(report.gradient_sqnr) == [v.path for v in model.trainable_variables]
    # Of b's kernel the operands have lost their bits in `rough`; its bias sees the error alone.
    assert all(5 < value < 60 for value in report.gradient_sqnr.values()), report.gradient_sqnr


def test_gradients_do_not_overflow_by_the_first_loss_scale():
    """It is of no use to hear that 2**24 was too much."""
    model, x, y = make("residual", optimizer=kmp.scaled("sgd", kmp.StaticLossScale(2.0**24)))
    report = kmp.debug.compare_precisions(model, x, y)
    assert all(value > 30 for value in report.gradient_sqnr.values()), report.gradient_sqnr


def test_a_planted_overflow_is_counted():
    model, x, _ = make("transformer")
    plant(find(model, "mlp"), "overflow")
    report = kmp.debug.compare_precisions(model, x)
    rows = {row.path: row for row in report.rows}
    assert rows["norm"].nonfinite == 0
    assert rows["mlp"].nonfinite > 0
    assert rows["mlp"].local_sqnr == rows["mlp"].output_sqnr == -math.inf
    assert report.worst(1) == ["mlp"]


def test_outputs_that_are_not_finite_in_float32_either(stack):
    """NumPy warns of inf - inf; what is compared is finite on both sides."""
    model, x = stack
    x = np.where(x > 0, np.float32(np.inf), x)
    rows = {row.path: row for row in kmp.debug.compare_precisions(model, x, policy=POLICY).rows}
    assert {row.path for row in rows.values()} == {"stack/a", "stack/rough", "stack/b"}
    assert all(row.nonfinite and math.isfinite(row.max_relative_error) for row in rows.values())


def test_rows_of_what_cannot_run_alone():
    """A layer inside another, and an operation: their noise is seen, but not their share."""
    model, x, _ = make("transformer")
    rows = {row.path: row for row in kmp.debug.compare_precisions(model, x).rows}
    assert not math.isnan(rows["attention"].output_sqnr)
    assert math.isnan(rows["attention/query"].output_sqnr)
    assert not math.isnan(rows["attention/query"].cumulative_sqnr)


def test_shared_layers_have_a_row_for_each_call():
    model, x, _ = make("subclassed")
    report = kmp.debug.compare_precisions(model, x)
    paths = [row.path for row in report.rows]
    assert "subclassed/shared" in paths
    assert "subclassed/shared (call 2)" in paths
    assert "subclassed/shared (call 2)" not in report.worst(10)


def test_printing(stack):
    model, x = stack
    text = str(kmp.debug.compare_precisions(model, x, policy=POLICY))
    lines = text.splitlines()
    assert lines[0].startswith("mixed_bfloat16 against float32: output SQNR ")
    assert [line.split()[0] for line in lines[2:5]] == ["stack/a", "stack/rough", "stack/b"]
    assert len({len(line) for line in lines[1:5]}) == 1
    assert lines[-1].startswith("Costs the output most: stack/rough")


@pytest.mark.parametrize("policy", ["float32", "float8", "", 3, "float64"])
@pytest.mark.parametrize("tool", [kmp.debug.compare_precisions, kmp.debug.diagnose])
def test_the_policy_must_be_half(stack, tool, policy):
    model, x = stack
    with pytest.raises(ValueError, match=r"computes in float16 or bfloat16. Received: policy="):
        tool(model, x, policy=policy)
    assert model.layers[0].dtype_policy.name == "float32"


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_by_default_a_model_is_judged_by_the_policy_that_it_has(stack, policy):
    model, x = stack
    for layer in model.layers:
        layer.dtype_policy = policy
    expected = "mixed_float16" if policy == "float32" else policy
    report = kmp.debug.compare_precisions(model, x)
    assert report.policy == expected
    assert report.output_sqnr == kmp.debug.compare_precisions(model, x, None, expected).output_sqnr
    assert kmp.debug.diagnose(model, x).policy.default_policy.name == expected


def test_a_model_that_does_not_run_in_half_is_told():
    def only_float32(x):
        if keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError("no such kernel")
        return x

    layer = layers.Lambda(only_float32, output_shape=lambda s: s, name="full")
    model = keras.Sequential([keras.Input((4,)), layer], name="net")
    with pytest.raises(ValueError, match=r"under 'mixed_bfloat16'\. kmp\.debug\.diagnose") as error:
        kmp.debug.compare_precisions(model, np.ones((2, 4)), policy=POLICY)
    assert isinstance(error.value.__cause__, TypeError)
    assert kmp.debug.diagnose(model, np.ones((2, 4))).float32_layers == ("net/full",)


def test_progress_is_shown_when_asked_for(stack, capsys):
    model, x = stack
    kmp.debug.compare_precisions(model, x, policy=POLICY)
    assert capsys.readouterr().out == ""
    kmp.debug.compare_precisions(model, x, policy=POLICY, verbose=1)
    assert "3/3" in capsys.readouterr().out


def test_a_float32_output_with_a_nan_is_said(stack):
    model, x = stack
    report = kmp.debug.compare_precisions(model, x * np.nan, policy=POLICY)
    assert math.isnan(report.output_sqnr)
    assert str(report).splitlines()[0] == (
        "mixed_bfloat16 against float32: no output SQNR, because the float32 output holds NaN or "
        "no finite float"
    )

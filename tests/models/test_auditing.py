"""audit: sound models have no findings, the report prints them, and nothing is changed."""

import keras
import numpy as np
import pytest
from audited import CROSSENTROPY, Masked, float16, kinds_of, model_of  # noqa: F401
from keras import layers
from oracle import BACKEND

import kmp
from kmp._keras import layers_of
from kmp.models.audit_rules import AUDIT_RULES


def test_a_sound_model_has_no_findings():
    model = model_of(
        layers.Rescaling(1e-3, dtype="float32"),
        layers.Dense(16, "relu"),
        kmp.layers.Float32BatchNormalization(),
        kmp.layers.Float32OutputDense(8),
        loss=CROSSENTROPY(from_logits=True),
        metrics=["accuracy", "mse"],
    )
    report = kmp.audit(model)
    assert not report and report.findings == ()
    assert str(report) == "Nothing dangerous was found."


def test_a_float32_model_has_no_findings():
    keras.config.set_dtype_policy("float32")
    model = model_of(layers.Rescaling(1.0), layers.Dense(3, "softmax"), loss=CROSSENTROPY())
    assert kinds_of(model) == []


def test_a_converted_model_has_no_findings():
    keras.config.set_dtype_policy("float32")
    stack = [layers.Rescaling(1e-3), layers.Dense(8, activity_regularizer="l2"), layers.Dense(8)]
    model = model_of(*stack, layers.Dense(8, "softmax"), loss=CROSSENTROPY(), optimizer="sgd")
    kmp.to_mixed_precision(model, "mixed_float16")
    assert kinds_of(model) == []


def test_a_report_prints_a_line_a_finding_and_selects():
    model = model_of(layers.Rescaling(1.0), layers.Dense(13), loss="mse")
    report = kmp.audit(model)
    assert [line.split(": ")[1] for line in str(report).splitlines()] == kinds_of(model)
    with pytest.raises(ValueError, match="`kind` must be one of"):
        report.of_kind("half-softmax")


def test_layers_with_the_same_finding_share_a_line():
    report = kmp.audit(model_of(*[layers.Rescaling(1e9) for _ in range(5)], layers.Dense(8)))
    lines = [line for line in str(report).splitlines() if ": constant: " in line]
    first = ", ".join(each.path for each in report.of_kind("constant")[:3])
    assert len(lines) == 1 and lines[0].startswith(f"{first} and 2 more: constant: ")


def test_every_kind_is_documented():
    assert all(f'"{kind}"' in kmp.audit.__doc__ for kind in AUDIT_RULES)


@pytest.mark.parametrize("model", [layers.Dense(1), None, "model"], ids=["layer", "None", "str"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r"must be a keras\.Model"):
        kmp.audit(model)


def test_a_model_that_is_not_built_is_refused():
    with pytest.raises(ValueError, match="must be built"):
        kmp.audit(keras.Sequential([layers.Dense(1)]))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_nothing_is_changed():
    model = model_of(Masked(), layers.Dropout(0.5), layers.Dense(13, "softmax"), loss="mse")
    model.optimizer.build(model.trainable_variables)
    variables = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    policies = [layer.dtype_policy for layer in layers_of(model)]
    assert kmp.audit(model)
    after = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    assert all(np.array_equal(a, b) for a, b in zip(variables, after, strict=True))
    assert all(x.dtype_policy is p for x, p in zip(layers_of(model), policies, strict=True))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_subclassed_model_without_a_config_is_audited():
    class Model(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.dense = layers.Dense(units)

        def call(self, x):
            return self.dense(x) * 1e9

    model = Model(13)
    model(np.ones((2, 8), "float32"))
    assert kinds_of(model) == ["constant", "tensor cores"], BACKEND

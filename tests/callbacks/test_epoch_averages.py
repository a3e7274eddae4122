"""The epoch's loss and metrics are those of `evaluate`: they leave out only what is not finite."""

import keras
import numpy as np
import pytest
from keras import ops
from linear_runs import JIT, SPE, data
from oracle import number

import kmp

pytestmark = pytest.mark.filterwarnings("ignore:Step")

# At this scale the gradients of targets of 2**12 leave float32, and those of the others do not. A
# learning rate of 0 leaves the weights alone, so that `evaluate` says what an epoch has to say.
SCALE, HUGE = 2.0**120, 2.0**12
FIXED = {"batch_size": 4, "verbose": 0}


def still_model(outputs=1, **compile_arguments):
    """A linear model that predicts 0, and whose numbers are whole."""
    inputs = keras.Input((2,))
    names = [f"output_{i}" for i in range(outputs)]
    layers = [keras.layers.Dense(1, kernel_initializer="zeros", name=name) for name in names]
    model = keras.Model(inputs, [layer(inputs) for layer in layers])
    metrics = [["mae"] for _ in names]
    weighted = [[keras.metrics.MeanSquaredError(name="weighted")] for _ in names]
    model.compile(
        kmp.scaled("sgd", SCALE, learning_rate=0.0),
        ["mse"] * outputs,
        # Keras 3.10 takes one list for a single output, and a list of lists for several.
        metrics=metrics if outputs > 1 else metrics[0],
        weighted_metrics=weighted if outputs > 1 else weighted[0],
        **compile_arguments,
    )
    return model


def overflowing_data(steps=(2, 5, 9)):
    """The batches of these steps overflow, and their loss is finite."""
    x, y = data()
    for step in steps:
        y[4 * step : 4 * step + 4] = HUGE
    return x, y


def epoch_of(model, x, y, watchers=(), **arguments):
    """The averages of one epoch, without what the callbacks add to the logs."""
    run = model.fit(x, y, shuffle=False, callbacks=list(watchers), **FIXED, **arguments)
    names = [name for name in run.history if name not in kmp.callbacks.curves.outlets.ALWAYS]
    return {name: run.history[name][0] for name in names}


def evaluation_of(model, x, y, **arguments):
    return model.evaluate(x, y, return_dict=True, **FIXED, **arguments)


WATCHERS = {
    "nobody": [],
    "GradientHealth": [kmp.callbacks.GradientHealth],
    "DivergenceGuard": [kmp.callbacks.DivergenceGuard],
    "all": [
        kmp.callbacks.GradientHealth,
        kmp.callbacks.DivergenceGuard,
        kmp.callbacks.TerminateOnNaN,
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("watchers", WATCHERS)
@pytest.mark.parametrize("weights", ["none", "sample", "class"])
def test_an_epoch_says_what_evaluate_says(weights, watchers):
    """Exactly, as all numbers are whole; skipped steps with a finite loss count."""
    x, y = overflowing_data()
    in_fit, in_evaluate = {}, {}
    if weights == "sample":
        in_fit = in_evaluate = {"sample_weight": np.arange(48, dtype="float32") % 4}
    if weights == "class":
        y = (y == HUGE).astype("float32")
        in_fit = {"class_weight": {0: 1.0, 1: HUGE**2}}
        in_evaluate = {"sample_weight": np.where(y[:, 0] == 1, HUGE**2, 1.0).astype("float32")}
    model = still_model()
    found = epoch_of(model, x, y, [watch() for watch in WATCHERS[watchers]], **in_fit)
    assert int(model.optimizer.skipped_steps) == 3
    assert found == evaluation_of(model, x, y, **in_evaluate)


@pytest.mark.slow
@pytest.mark.parametrize("jit", JIT)
@pytest.mark.parametrize("spe", SPE)
@pytest.mark.parametrize("outputs", [1, 2])
def test_an_epoch_of_skipped_steps_says_what_evaluate_says(outputs, spe, jit):
    """Of several outputs, each has a loss of its own."""
    x, y = overflowing_data(range(12))
    model = still_model(outputs, steps_per_execution=spe, jit_compile=jit)
    targets = [y, y + 1][:outputs]
    with kmp.protect(model):
        found = epoch_of(model, x, targets)
    assert int(model.optimizer.skipped_steps) == 12
    assert found == evaluation_of(model, x, targets)


@pytest.mark.slow
@pytest.mark.parametrize("jit", JIT)
@pytest.mark.parametrize("spe", SPE)
def test_a_batch_whose_loss_is_not_finite_counts_nowhere(spe, jit):
    """Not in the loss, and not in the metrics, where it would be finite."""
    x, y = overflowing_data()
    x[24:28] = np.nan  # a step that does not overflow
    good = np.delete(np.arange(48), np.arange(24, 28))

    def model():
        made, settings = still_model(), {"jit_compile": jit, "steps_per_execution": spe}
        made.compile(made.optimizer, "mse", metrics=[Counted(), "mae"], **settings)
        return made

    watched = model()
    with kmp.protect(watched):
        found = epoch_of(watched, x, y)
    assert int(watched.optimizer.skipped_steps) == 4
    assert found == evaluation_of(watched, x[good], y[good])
    assert found["counted"] == 44


class Counted(keras.metrics.Sum):
    """How many samples have counted, whatever is predicted for them."""

    def __init__(self):
        super().__init__(name="counted")

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(ops.ones_like(y_true))


@pytest.mark.parametrize("jit", JIT)
@pytest.mark.parametrize("spe", SPE)
def test_each_metric_leaves_out_what_is_not_finite(spe, jit):
    """The loss and one of the metrics mask a prediction of NaN, whose gradient is NaN."""

    def masked(y, outputs):
        return ops.square(ops.where(ops.isfinite(outputs), outputs, 3.0) - y)

    x, y = data()
    x[24] = np.nan
    good = np.delete(np.arange(48), np.arange(24, 28))
    model = still_model()
    settings = {"jit_compile": jit, "steps_per_execution": spe}
    model.compile(model.optimizer, masked, metrics=[Counted(), "mae"], **settings)
    with kmp.protect(model):
        found = epoch_of(model, x, y)
    assert int(model.optimizer.skipped_steps) == 1
    everywhere, without = evaluation_of(model, x, y), evaluation_of(model, x[good], y[good])
    assert np.isnan(everywhere.pop("mae"))
    assert found.pop("mae") == without["mae"]
    assert found == everywhere and found["counted"] == 48


@pytest.mark.slow
@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("watchers", ["nobody", "all"])
def test_replicas_say_what_evaluate_says(watchers):
    import replicas

    x, y = overflowing_data()
    strategy = replicas.mirrored(2)
    with strategy.scope():
        model = still_model()
    found = epoch_of(model, x, y, [watch() for watch in WATCHERS[watchers]])
    assert number(model.optimizer.skipped_steps) == 3
    assert found == evaluation_of(model, x, y)


@pytest.mark.parametrize("steps, skips, said", [(10, 1, False), (50, 2, True), (199, 1, False)])
def test_a_share_of_skipped_steps_above_1_percent_is_said(steps, skips, said):
    """After the first 100 steps, in which overflows find the scale."""
    x, y = data(100 + steps)
    y[:40] = HUGE
    for step in range(100, 100 + skips):
        y[4 * step : 4 * step + 4] = HUGE
    model, watch = still_model(), kmp.callbacks.GradientHealth()
    with pytest.warns() as caught:
        epoch_of(model, x, y, [watch])
    message = f"{skips} of the last {steps} steps were skipped"
    assert any(message in str(warning.message) for warning in caught) == said
    assert watch.report.skipped_steps == 10 + skips

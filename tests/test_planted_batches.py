"""What benchmarks/experiments/spikes.py does in `fit`: the rules of others, a model that is shared.

The rules are checked against loops in NumPy, written from the sources of OLMo-core and ZClip.
"""

import pathlib
import sys

import keras
import numpy as np
import pytest

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "experiments"
STEPS, BATCH = 150, 4
# OLMo-core's rule waits for 64 steps, and the loss of 122 is 6.5 deviations off; ZClip's waits for
# 25, and those of 1.5 to 3 are near its threshold.
BAD = {40: 1e2, 62: 1e3, 63: 1e4, 120: 1e6, 122: 9.7e5}
BAD |= {step: 1.5 + (step - 26) / 20 for step in range(26, 60, 3) if step not in BAD}


@pytest.fixture(scope="module")
def parts():
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        import spike_rules
        import spikes_in_fit
    finally:
        sys.path.remove(str(EXPERIMENTS))
    return spike_rules, spikes_in_fit


def olmo(norms, losses):
    """True for the steps that OLMo-core leaves out: above the mean of 128 by 6 deviations."""

    def is_far(values):
        known = np.array(values[-129:-1], "float64")
        return values[-1] - known.mean() > 6 * known.std(ddof=1)

    acted = []
    for i in range(len(norms)):
        seen = norms[: i + 1], losses[: i + 1]
        acted.append(i + 1 >= 64 and any(is_far(values) for values in seen))
    return acted


def zclip(norms, losses):
    """True for the steps that ZClip clips: more than 2.5 deviations above the moving mean."""
    mean, variance, acted = np.mean(norms[:25]), np.var(norms[:25]), [False] * 25
    for norm in norms[25:]:
        score = (norm - mean) / np.sqrt(variance)
        acted.append(score > 2.5)
        if acted[-1]:
            norm = mean + 2.5 * np.sqrt(variance) * 2.5 / score
        mean = 0.97 * mean + 0.03 * norm
        variance = 0.97 * variance + 0.03 * (norm - mean) ** 2
    return acted


def trained(rules, peer, x, y, rate):
    """A linear model after an epoch, whose optimizer follows a rule."""
    model = rules.TellsLoss(
        [keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    inner = keras.optimizers.SGD(rate, momentum=0.9)
    model.compile(rules.following(peer, inner, STEPS), "mse")
    model.fit(x, y, BATCH, 1, 0, shuffle=False)
    return model


def data():
    """Inputs and targets with bad batches; norms and losses of weights that stay at 1."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(STEPS, BATCH, 3)), random.normal(size=(STEPS, BATCH, 1))
    for step, size in BAD.items():
        y[step] *= size
    errors = x.sum(axis=2, keepdims=True) - y
    gradients = 2 * (errors * x).mean(axis=1)
    x, y = (each.reshape(-1, each.shape[-1]).astype("float32") for each in (x, y))
    return x, y, list(np.linalg.norm(gradients, axis=1)), list((errors**2).mean(axis=(1, 2)))


@pytest.mark.parametrize("oracle", [olmo, zclip])
def test_a_rule_of_others_acts_in_fit_where_its_source_says(parts, oracle):
    rules, _ = parts
    x, y, norms, losses = data()
    model = trained(rules, getattr(rules, oracle.__name__)(), x, y, rate=0.0)
    acted = keras.ops.convert_to_numpy(model.optimizer.acted).astype(bool).tolist()
    assert acted == [bool(each) for each in oracle(norms, losses)]
    assert acted[63] and acted[120] and not all(acted[64:])


def test_olmo_acts_on_a_loss_alone(parts):
    """A batch whose loss is far off and whose gradients are those of any other."""
    rules, _ = parts
    x, y, _, _ = data()
    x[:], y[:] = x[:BATCH].repeat(STEPS, axis=0), 0.0
    x += np.random.default_rng(1).normal(0, 0.01, x.shape)
    bad = slice(100 * BATCH, 101 * BATCH)
    x[bad] /= 1e3
    y[bad] = -1e3
    model = trained(rules, rules.olmo(), x, y, rate=0.0)
    (acted,) = np.nonzero(keras.ops.convert_to_numpy(model.optimizer.acted))
    assert 100 in acted


def test_a_step_that_olmo_leaves_out_leaves_nothing(parts):
    rules, _ = parts
    x, y, _, _ = data()
    for step in BAD:
        y[step * BATCH : (step + 1) * BATCH] /= BAD[step]
    bad = slice(120 * BATCH, 121 * BATCH)
    seen = [np.delete(each, bad, axis=0) for each in (x, y)]
    y[bad] *= 1e6
    model, never = (trained(rules, rules.olmo(), *each, rate=0.01) for each in ((x, y), seen))
    acted = keras.ops.convert_to_numpy(model.optimizer.acted)
    assert acted.sum() == acted[120] == 1
    slots = [keras.ops.convert_to_numpy(m.optimizer.variables[2]) for m in (model, never)]
    np.testing.assert_array_equal(model.get_weights()[0], never.get_weights()[0])
    np.testing.assert_array_equal(*slots)
    assert int(model.optimizer.iterations) == STEPS - 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::kmp.PrecisionWarning")  # of the batch that was planted
@pytest.mark.parametrize("rule", ["OLMo-core", "DivergenceGuard", 'spikes="skip"'])
def test_runs_that_share_a_model_do_not_know_of_each_other(parts, monkeypatch, rule):
    _, in_fit = parts
    monkeypatch.setattr(in_fit, "BATCHES", 120)
    case = "teacher and student", "Adam", rule
    train = in_fit.Fit(*case)
    first = train(0, 70, 1e4)
    other = train(1, 80, 1e8)
    assert train(0, 70, 1e4) == first != other
    assert in_fit.Fit(*case)(0, 70, 1e4) == first

"""Runs that somebody is advised about: as they were, as the advice has it, and the same in float32
without kmp, which is the oracle."""

import contextlib
import tempfile
import warnings
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

import kmp

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
STEPS, BATCH = 40, 8  # of an epoch


class Outcome(NamedTuple):
    """What was seen of a run, or of a tool.

    Attributes:
        said: the verdict and all warnings, or the report.
        state: of the verdict; of a tool "found" or "clean".
        figure: the loss of the weights in float32, or another error that is to be small.
    """

    said: str
    state: str
    figure: float


def regression(steps=STEPS):
    """Inputs, targets and sample weights of one epoch."""
    x = np.random.default_rng(0).normal(size=(steps * BATCH, 8)).astype("float32")
    return x, np.tanh(x.sum(axis=1, keepdims=True)), np.ones(len(x), "float32")


def classes():
    x, _, weights = regression()
    return x, x[:, :4].argmax(axis=1), weights


def hidden(units=16, **arguments):
    return keras.layers.Dense(units, **{"activation": "tanh", "name": "hidden", **arguments})


def head(units=1, **arguments):
    return kmp.layers.Float32OutputDense(units, name="head", **arguments)


USUAL = {
    "model": keras.Sequential,
    "policy": "mixed_float16",
    "layers": lambda: [hidden(), head()],
    "prepare": lambda model: None,  # once it is built, before it is compiled
    "optimizer": "adam",
    "rate": 0.01,
    "inner": {},  # further arguments of the optimizer
    "wrap": kmp.scaled,  # the optimizer
    "scaled": {},  # further arguments of kmp.scaled
    "loss": "mse",
    "data": regression,
    "epochs": 3,
    "watch": {"update_freq": 10},
    "compile": {},
    "evaluate_on": None,  # other data, where those of the training are not sound
}


def inner_optimizer(settings):
    rate = settings["rate"]
    config = {"learning_rate": rate() if callable(rate) else rate, **settings["inner"]}
    return keras.optimizers.get({"class_name": settings["optimizer"], "config": config})


def built(settings):
    keras.config.set_dtype_policy(settings["policy"])
    keras.utils.set_random_seed(0)
    shape = settings["data"]()[0].shape[1:]
    model = settings["model"]([keras.Input(shape), *settings["layers"]()])
    settings["prepare"](model)
    return model


def loss_in_float32(model, settings):
    """Of trained weights, on the sound data, without their weights."""
    plain = {"model": keras.Sequential, "policy": "float32", "prepare": lambda model: None}
    twin = built({**settings, **plain})
    twin.set_weights([np.asarray(w, "float32") for w in model.get_weights()])
    x, y, _ = (settings["evaluate_on"] or settings["data"])()
    outputs = twin.predict_on_batch(x)
    loss = keras.losses.get(settings["loss"])
    with np.errstate(all="ignore"):
        found = loss(ops.convert_to_tensor(y), ops.convert_to_tensor(outputs))
    return float(ops.convert_to_numpy(ops.mean(found)))


def fit(model, settings, callbacks=(), **more):
    x, y, weights = settings["data"]()
    steps = {"batch_size": BATCH, "epochs": settings["epochs"], "shuffle": False, "verbose": 0}
    return model.fit(x, y, sample_weight=weights, callbacks=[*callbacks], **{**steps, **more})


@contextlib.contextmanager
def heard():
    """The texts of all warnings."""
    texts = []
    with warnings.catch_warnings(record=True) as caught, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if issubclass(w.category, kmp.PrecisionWarning)]


def train(**changes):
    """A run that `GradientHealth` watches."""
    settings = {**USUAL, **changes}
    with heard() as texts:
        model = compiled(settings)
        watch = kmp.callbacks.GradientHealth(**settings["watch"])
        fit(model, settings, [watch])
    said = "\n".join([str(watch.verdict), *texts])
    return Outcome(said, watch.verdict.state, loss_in_float32(model, settings))


def compiled(settings):
    model = built(settings)
    optimizer = settings["wrap"](inner_optimizer(settings), **settings["scaled"])
    model.compile(optimizer, settings["loss"], **settings["compile"])
    return model


def audited(kind, **changes):
    """What `kmp.audit` finds of this kind, in a model that is not trained."""
    with heard():
        found = kmp.audit(compiled({**USUAL, **changes})).of_kind(kind)
    return "\n".join(map(str, found))


def located(step=0, **changes):
    """What `locate_nonfinite` says of a batch, of a model that is not trained."""
    settings = {**USUAL, **changes}
    rows = slice(step * BATCH, (step + 1) * BATCH)
    batch = [part[rows] for part in settings["data"]()]
    with heard():
        report = kmp.debug.locate_nonfinite(compiled(settings), *batch)
    return str(report)


def resumed(bad, cure=None, **changes):
    """A run whose last epoch goes wrong, and what is done about it.

    Args:
        bad: the settings of that epoch.
        cure: what is done before another, sound epoch: None, and there is no other; "checkpoint", a
            file from before the bad epoch is loaded; "new optimizer"; or "go on", with
            such data; or "nothing".
    """
    settings = {**USUAL, **changes}
    with heard() as texts, tempfile.TemporaryDirectory() as folder:
        model, watch = compiled(settings), kmp.callbacks.GradientHealth(**settings["watch"])
        fit(model, settings, [watch])
        model.save(f"{folder}/before.keras")
        fit(model, {**settings, **bad}, [watch], epochs=1)
        if cure is not None:
            if cure != "nothing":
                watch = kmp.callbacks.GradientHealth(**settings["watch"])
            if cure == "checkpoint":
                model = keras.saving.load_model(f"{folder}/before.keras", safe_mode=False)
            elif cure == "new optimizer":
                model.compile(kmp.scaled(inner_optimizer(settings)), settings["loss"])
            fit(model, {**settings, **(bad if cure == "go on" else {})}, [watch], epochs=1)
    said = "\n".join([str(watch.verdict), *texts])
    return Outcome(said, watch.verdict.state, loss_in_float32(model, settings))


_ORACLE: dict[str, float] = {}


def in_float32(**changes):
    """The loss that plain Keras reaches in float32 with the same settings; each is run once."""
    ours = {"model": keras.Sequential, "policy": "float32", "watch": 0, "scaled": 0, "wrap": 0}
    settings = {**USUAL, **changes, **ours, "compile": 0}
    key = repr(sorted(settings.items()))
    if key not in _ORACLE:
        model = built(settings)
        model.compile(inner_optimizer(settings), settings["loss"])
        with np.errstate(all="ignore"):
            fit(model, settings)
        _ORACLE[key] = loss_in_float32(model, settings)
    return _ORACLE[key]

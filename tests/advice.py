"""Every advice of kmp, followed.

    KERAS_BACKEND=jax python tests/advice.py                 docs/lab/advice.md, in ten minutes
    KERAS_BACKEND=jax python tests/advice.py Underflow       its rows again

A row is a message, a situation that brings it about, what was done as the message says, and how the
run was then. `tests/test_advice.py` runs the same rows.
"""

import pathlib
import re
import sys
import tempfile
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
from advised_runs import (
    BATCH,
    LOGITS,
    STEPS,
    USUAL,
    Outcome,
    audited,
    built,
    classes,
    compiled,
    fit,
    head,
    heard,
    hidden,
    in_float32,
    inner_optimizer,
    located,
    loss_in_float32,
    regression,
    resumed,
    train,
)
from follower import MOVED, Follower, share_moved
from forgetful import Forgetful
from keras import layers, ops
from keras.callbacks import LambdaCallback

import kmp
from kmp._backend import backend

AUDIT = "audit: "


class Advice(NamedTuple):
    """A row.

    Attributes:
        of: the detector, the kind of finding, or what else gives the advice.
        says: what the message says, word for word.
        situation: what the run is.
        before: its settings, or a function that runs it.
        done: what was done.
        after: the settings that were changed, or a function.
        located: what `locate_nonfinite` names in the situation, where the advice is to ask it.
        step: the batch that it is asked about.
        backends: where the situation is to be had; everywhere if empty.
        float32: settings of the oracle, a float32 run without kmp; by default those of `after`.
        quick: whether it runs in every `make test`.
        state: the verdict on what was done.
        tolerance: times the oracle's loss.
    """

    of: str
    says: str
    situation: str
    before: Any
    done: str
    after: Any
    located: str = ""
    step: int = 0
    backends: tuple[str, ...] = ()
    float32: dict[str, Any] | None = None
    quick: bool = False
    state: str = "HEALTHY"
    tolerance: float = 1.3

    def was(self) -> Outcome:
        if callable(self.before):
            return self.before()
        if self.of.startswith(AUDIT):
            return Outcome(audited(self.of.removeprefix(AUDIT), **self.before), "found", np.nan)
        return train(**self.before)

    def is_now(self) -> Outcome:
        if callable(self.after):
            return self.after()
        settings = {**self.before, **self.after}
        if self.of.startswith(AUDIT):
            assert not audited(self.of.removeprefix(AUDIT), **settings)
        return train(**settings)

    @property
    def compared(self) -> bool:
        """Whether the figure is a loss, which the oracle has too."""
        return self.tolerance > 0

    @property
    def id(self) -> str:
        return f"{self.of}: {self.says[:40]}"

    def oracle(self) -> float:
        """The loss in float32 without kmp, of what was done."""
        if self.float32 is not None or callable(self.after):
            return in_float32(**(self.float32 or {}))
        return in_float32(**{**self.before, **self.after})


# Data with a fault


def with_fault(change, data=regression):
    """`data`, changed in place by `change(x, y, weights)`, whose first axis is the step."""

    def faulty():
        x, y, weights = data()
        change(*(part.reshape(-1, BATCH, *part.shape[1:]) for part in (x, y, weights)))
        return x, y, weights

    return faulty


def nan_targets(x, y, weights):
    y[20] = np.nan


def weighing(weight, every=1, data=regression):
    """Every so many batches weigh so much."""

    def change(x, y, weights):
        weights[::every] = weight

    return with_fault(change, data)


def huge(what, times, at=30):
    """The inputs, targets or weights of one batch are so many times as large."""

    def change(*parts):
        parts["xyw".index(what)][at] *= np.float32(times)

    return with_fault(change)


def zero_rows(x, y, weights):
    x[3] = 0


def small_inputs():
    x, _, weights = regression()
    return x * np.float32(1e-3), np.arange(len(x)) % 4, weights


def noise():
    x, _, weights = regression()
    return x, np.random.default_rng(1).normal(size=(len(x), 1)).astype("float32"), weights


def large_targets():
    x, y, weights = regression()
    return x, y * 100, weights


def long_epoch():
    return regression(120)


def short_epoch():
    return regression(12)


# Layers and losses with a fault


def root_of_zero(y, outputs):
    """Whose gradient is NaN although it is finite."""
    return ops.sqrt(ops.mean(ops.square(outputs - outputs))) + ops.mean(ops.square(y - outputs))


def mended_root(y, outputs):
    square = ops.mean(ops.square(outputs - outputs))
    return ops.sqrt(square + 1e-6) + ops.mean(ops.square(y - outputs))


def sometimes_broken(y, outputs):
    """Whose gradient is NaN where a target is above 100, as a flag for nothing known."""
    return always_whole(y, outputs) + 1e-30 * ops.mean(
        ops.sqrt(ops.where(y > 100, outputs - outputs, 1.0))
    )


def always_whole(y, outputs):
    """The same, mended: no root is taken."""
    known = ops.cast(y < 100, outputs.dtype)
    return ops.mean(known * ops.square(outputs - known * y))


def flagged(*steps, data=regression):
    """Batches whose targets are flags."""

    def change(x, y, weights):
        y[list(steps)] = 1000.0

    return with_fault(change, data)


@keras.saving.register_keras_serializable("advice")
class Ends(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that is NaN from a step on."""

    def __init__(self, at=130):
        self.at = at

    def __call__(self, step):
        return ops.where(ops.cast(step, "float32") > float(self.at), np.nan, 0.01)

    def get_config(self):
        return {"at": self.at}


class Lost(layers.Layer):
    """Hands its inputs on, beside weights of inf whose part is replaced by zeros."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        return x + ops.nan_to_num(0.0 * ops.matmul(x, self.kernel), posinf=0.0, neginf=0.0)


def lose(model):
    kernel = model.layers[0].kernel
    kernel.assign(ops.full(kernel.shape, np.inf))


def dead(model):
    model.get_layer("hidden").bias.assign(np.full(16, -100.0))


def dead_half(model):
    dead(model)
    model.get_layer("middle").bias.assign(np.ones(16))


def all_zero(model):
    for layer in model.layers:
        layer.kernel.assign(ops.zeros(layer.kernel.shape))


def saturate(model):
    last = model.layers[-1]
    kernel, bias = last.get_weights()
    last.set_weights([np.concatenate([0 * kernel[:, :1], kernel[:, 1:]], 1), 0 * bias])
    last.bias.assign([40.0, 0.0, 0.0, 0.0])


def relus():
    return [
        hidden(activation="relu"),
        hidden(activation="relu", name="middle"),
        head(),
    ]


def freeze(*names):
    def change(model):
        for name in names or [layer.name for layer in model.layers]:
            model.get_layer(name).trainable = False

    return change


def forget(model):
    model.stepped = None


def remember(model):
    model.stepped = "its own"


def unscaled(model):
    model.stepped, model.scales = "its own", False


def clips(how):
    def prepare(model):
        model.stepped, model.clips = "its own", how

    return prepare


def in_one_batch(drop_remainder):
    """Train on a dataset whose batch is larger than all examples together."""
    import tensorflow as tf

    settings = USUAL
    examples = tf.data.Dataset.from_tensor_slices(settings["data"]())
    with heard() as texts:
        model = compiled(settings)
        watch = kmp.callbacks.GradientHealth()
        model.fit(examples.batch(1000, drop_remainder), epochs=3, verbose=0, callbacks=[watch])
    said = "\n".join([str(watch.verdict), *texts])
    return Outcome(said, watch.verdict.state, loss_in_float32(model, settings))


def follow(pattern, before, **more):
    """Train with what the message says to write, as it is written."""

    def after():
        said = train(**before).said
        found = re.search(pattern, said)
        assert found, said
        written = eval(found.group(1), {"kmp": kmp})
        return train(**{**before, "scaled": {"loss_scale": written}, **more})

    return after


def scale_that_holds(step=0, **before):
    """Train with the loss scale that `locate_nonfinite` says holds the gradients of a batch."""
    report = located(step, **before)
    holds = float(re.search(r"A loss scale of at most (\S+) holds", report).group(1))
    rule = kmp.DynamicLossScale(initial_scale=holds)
    return train(**{**before, "scaled": {"loss_scale": rule}})


A = Advice
NOT_TF = ("jax", "torch")  # TensorFlow's CPU kernels keep these gradients finite in float16
LOCATE = "kmp.debug.locate_nonfinite(model, x, y) names the layer"

schedules = keras.optimizers.schedules


def normalized(**dtype):
    first = hidden(activation=None, use_bias=False)
    return [first, layers.UnitNormalization(name="began", **dtype), head(4)]


def loud(times=1e6, **dtype):
    return [
        hidden(),
        layers.Rescaling(times, name="loud", **dtype),
        layers.Rescaling(1 / times, **dtype),
        head(),
    ]


def with_log(epsilon):
    def log(x):
        return ops.log(ops.relu(x) + epsilon)

    return [hidden(), layers.Lambda(log, name="log"), head()]


def words():
    """A batch has one word, 640 times in each sample."""
    x, _, weights = regression()
    return np.zeros((len(x), 640), "int32"), np.ones((len(x), 1)), weights


def frequent(**dtype):
    table = layers.Embedding(2, 1, embeddings_initializer="ones", name="words", **dtype)
    return [table, layers.GlobalAveragePooling1D(dtype="float32"), head(use_bias=False)]


def protected(**changes):
    """Trained without a callback."""
    settings = {**USUAL, **changes}
    model = compiled(settings)
    kmp.protect(model)
    fit(model, settings)
    found = half_gradients(model)
    return Outcome(found, "found" if found else "clean", loss_in_float32(model, settings))


def watched(**changes):
    """Trained with a callback; audited meanwhile."""
    settings, found = {**USUAL, **changes}, []
    model = compiled(settings)
    audit = LambdaCallback(on_epoch_end=lambda *_: found.append(half_gradients(model)))
    fit(model, settings, [kmp.callbacks.TerminateOnNaN(), audit])
    found = "\n".join(filter(None, found))
    return Outcome(found, "found" if found else "clean", loss_in_float32(model, settings))


def half_gradients(model):
    return "\n".join(map(str, kmp.audit(model).of_kind("half gradient")))


def start_alike(model):
    """From the same weights in every dtype: TensorFlow draws others in bfloat16."""
    draw = np.random.default_rng(0).normal
    model.set_weights([draw(scale=0.3, size=v.shape) for v in model.weights])


def saturate_head(model):
    kernel, _ = model.get_layer("head").get_weights()
    model.get_layer("head").set_weights([kernel / 100, np.array([7.5])])


def huge_targets():
    x, y, weights = regression()
    return x, 1e7 * y, weights


FREQUENT = {
    "policy": "mixed_bfloat16",
    "layers": frequent,
    "data": words,
    "optimizer": "sgd",
    "rate": 0.003,
}

TINY = {"data": weighing(2.0**-42), "optimizer": "sgd", "rate": 2.0**38}


def one_layer():
    return [layers.Dense(1)]


COLLAPSED = {
    "data": weighing(1e8),
    "scaled": {"loss_scale": kmp.DynamicLossScale(min_scale=2.0**10)},
}
AT_FLOOR = {
    "data": weighing(5e5, every=120, data=long_epoch),
    "scaled": {"loss_scale": kmp.DynamicLossScale(1.0, min_scale=1.0)},
    "optimizer": "lion",  # whose steps no batch makes longer
    "rate": 0.001,
    "epochs": 7,
}
FLOAT32 = {"policy": "float32"}
SOFTMAX = {
    "layers": lambda: [hidden(), layers.Dense(4, "softmax", name="head")],
    "prepare": saturate,
    "data": classes,
    "loss": keras.losses.SparseCategoricalCrossentropy(),
    "optimizer": "sgd",
    "rate": 0.5,
    "epochs": 8,
}

OF_NUMBERS = [
    A(
        "ForwardNaN",
        "look for a bad batch",
        "the targets of one batch are NaN",
        {"data": with_fault(nan_targets)},
        "that batch was left out",
        {"data": regression},
        located="the batch itself is not finite",
        step=20,
        quick=True,
    ),
    A(
        "ForwardNaN",
        LOCATE,
        "a layer multiplies by 1e6 in float16, and the next divides",
        {"layers": loud},
        'both with `dtype="float32"`',
        {"layers": lambda: loud(dtype="float32")},
        located="loud",
    ),
    A(
        "ForwardNaN",
        "a division or logarithm of zero",
        "the logarithm of relu, in float32",
        {"layers": lambda: with_log(0.0), **FLOAT32},
        "a hundredth was added before it",
        {"layers": lambda: with_log(0.01)},
        located="log",
    ),
    A(
        "NonfiniteWeights",
        "so look at the learning rate",
        "a learning rate that is NaN from a step on",
        lambda: resumed({}, optimizer="sgd", rate=Ends),
        "the checkpoint was loaded, and the schedule mended",
        lambda: resumed({}, "checkpoint", optimizer="sgd", rate=lambda: Ends(10_000)),
        float32={"optimizer": "sgd", "epochs": 4},
    ),
    A(
        "NonfiniteWeights",
        "for a batch whose gradients are huge, which the optimizer squares",
        "one batch weighs 1e25, and Adam squares it",
        lambda: resumed({"data": huge("w", 1e25)}, loss="mae", **FLOAT32),
        "the checkpoint was loaded, and the batch left out",
        lambda: resumed({"data": huge("w", 1e25)}, "checkpoint", loss="mae", **FLOAT32),
        float32={"loss": "mae", "epochs": 4},
    ),
    A(
        "NonfiniteWeights",
        "No step brings them back: load a checkpoint from before",
        "weights of inf, whose effect the layer replaces by zeros",
        {"layers": lambda: [Lost(), hidden(), head()], "prepare": lose},
        "the weights from before",
        {"prepare": USUAL["prepare"]},
    ),
    A(
        "NonfiniteState",
        "load a checkpoint from before, and look for a batch of another scale. "
        "kmp.layers.Float32BatchNormalization takes in no statistics that are not finite",
        "one batch is 1e20 times as large",
        lambda: resumed(
            {"data": huge("x", 1e20)},
            layers=lambda: [layers.BatchNormalization(), *usual()],
            **FLOAT32,
        ),
        "the checkpoint was loaded, and the batch left out",
        lambda: resumed(
            {"data": huge("x", 1e20)},
            "checkpoint",
            layers=lambda: [layers.BatchNormalization(), *usual()],
            **FLOAT32,
        ),
        float32={"layers": lambda: [layers.BatchNormalization(), *usual()], "epochs": 4},
        backends=("jax", "tensorflow"),  # on torch its gradients are NaN
    ),
    A(
        "NonfiniteState",
        "kmp.layers.Float32BatchNormalization takes in no statistics that are not finite",
        "one batch is 1e20 times as large",
        lambda: resumed(
            {"data": huge("x", 1e20)},
            layers=lambda: [layers.BatchNormalization(), *usual()],
            **FLOAT32,
        ),
        "the layer was exchanged, and the batch trained on",
        lambda: resumed(
            {"data": huge("x", 1e20)},
            layers=lambda: [kmp.layers.Float32BatchNormalization(), *usual()],
            **FLOAT32,
        ),
        float32={"layers": lambda: [layers.BatchNormalization(), *usual()], "epochs": 4},
        backends=("jax", "tensorflow"),
    ),
    A(
        "NonfiniteState",
        "load a checkpoint from before, or compile the model with a new optimizer",
        "one batch weighs 1e25, and RMSprop squares it",
        lambda: resumed({"data": huge("w", 1e25)}, loss="mae", optimizer="rmsprop", **FLOAT32),
        "compiled with a new optimizer",
        lambda: resumed(
            {"data": huge("w", 1e25)}, "new optimizer", loss="mae", optimizer="rmsprop", **FLOAT32
        ),
        float32={"loss": "mae", "optimizer": "rmsprop", "epochs": 4},
    ),
    A(
        "RuinedVariance",
        "load a checkpoint from before, and look for a batch of another scale",
        "one batch is 1e9 times as large",
        lambda: resumed(
            {"data": huge("x", 1e9)},
            layers=lambda: [layers.BatchNormalization(), *usual()],
            **FLOAT32,
        ),
        "the checkpoint was loaded, and the batch left out",
        lambda: resumed(
            {"data": huge("x", 1e9)},
            "checkpoint",
            layers=lambda: [layers.BatchNormalization(), *usual()],
            **FLOAT32,
        ),
        float32={"layers": lambda: [layers.BatchNormalization(), *usual()], "epochs": 4},
    ),
    A(
        "RuinedVariance",
        'kmp.scaled(..., spikes="skip") holds the statistics against such a batch',
        "one batch is 1e9 times as large",
        lambda: resumed(
            {"data": huge("x", 1e9)},
            layers=lambda: [layers.BatchNormalization(), *usual()],
            **FLOAT32,
        ),
        "as it says, and the batch trained on",
        lambda: resumed(
            {"data": huge("x", 1e9)},
            layers=lambda: [layers.BatchNormalization(), *usual()],
            scaled={"spikes": "skip"},
            **FLOAT32,
        ),
        float32={"layers": lambda: [layers.BatchNormalization(), *usual()], "epochs": 4},
    ),
    A(
        "UpdateSlowdown",
        "load a checkpoint from before",
        "the targets of one batch are 1e7 times as large, and Adam remembers it",
        lambda: resumed({"data": huge("y", 1e7)}, "nothing", epochs=4, **FLOAT32),
        "the checkpoint was loaded, and the batch left out",
        lambda: resumed({"data": huge("y", 1e7)}, "checkpoint", epochs=4, **FLOAT32),
        float32={"epochs": 5},
    ),
]


def usual():
    return [hidden(), head()]


OF_OVERFLOWS = [
    A(
        "Collapsed",
        LOCATE.replace(" names", " on such a batch names"),
        "vectors near zero are normalized in float16",
        {"layers": normalized, "data": small_inputs, "loss": LOGITS},
        'that layer with `dtype="float32"`',
        {"layers": lambda: normalized(dtype="float32")},
        located="began",
        backends=NOT_TF,
    ),
    A(
        "Collapsed",
        "write kmp.DynamicLossScale(initial_scale=...) with that number",
        "samples weigh 1e8, and the floor of the scale is 1024",
        COLLAPSED,
        "with the number that `locate_nonfinite` gives",
        lambda: scale_that_holds(**COLLAPSED),
        located="A loss scale of at most",
        backends=NOT_TF,
        float32=COLLAPSED,
        quick=True,
    ),
    A(
        "Collapsed",
        "unless code of your own casts to it, no loss scale helps, and kmp.debug.locate_nonfinite",
        "the gradient of the loss is NaN, in float32",
        {"loss": root_of_zero, **FLOAT32},
        "the root was mended, in the loss, where `locate_nonfinite` finds it",
        {"loss": mended_root},
        located="loss",
    ),
    A(
        "Collapsed",
        'Write loss_scale="dynamic"',
        "a fixed scale of 2**22",
        {"scaled": {"loss_scale": 2.0**22}},
        "as it says",
        {"scaled": {"loss_scale": "dynamic"}},
        backends=NOT_TF,
    ),
    A(
        "Collapsed",
        'Write loss_scale="none"',
        "a fixed scale of 2**125 in float32, and samples that weigh 1e6",
        {"scaled": {"loss_scale": 2.0**125}, "data": weighing(1e6), **FLOAT32},
        "as it says",
        {"scaled": {"loss_scale": "none"}},
    ),
    A(
        "AllSkipped",
        "has not found its level. kmp.debug.locate_nonfinite",
        "samples weigh 1e10",
        {"data": weighing(1e10)},
        "with the number that `locate_nonfinite` gives",
        lambda: scale_that_holds(data=weighing(1e10)),
        located="A loss scale of at most",
        backends=NOT_TF,
        float32={"data": weighing(1e10)},
    ),
    A(
        "BrokenGradients",
        "no loss scale helps, and kmp.debug.locate_nonfinite",
        "one batch has a gradient of NaN, in float32",
        {"loss": sometimes_broken, "data": flagged(30), "epochs": 4, **FLOAT32},
        "the loss was mended",
        {"loss": always_whole},
        located="loss",
        step=30,
    ),
    A(
        "Calibrating",
        "If it goes on, kmp.debug.locate_nonfinite",
        "the gradient of the loss is NaN in each of 12 steps",
        {"loss": root_of_zero, "data": short_epoch, "epochs": 1},
        "the loss was mended",
        {"loss": mended_root},
        located="loss",
    ),
    A(
        "OverflowRate",
        "If none can, mend that layer",
        "one batch in five has a gradient of NaN",
        {"loss": sometimes_broken, "data": flagged(*range(0, STEPS, 5)), "epochs": 5},
        "the loss was mended",
        {"loss": always_whole},
        located="loss",
    ),
    A(
        "LostAtFloor",
        "with that number",
        "one batch in 120 weighs 5e5, and the floor of the scale is 1",
        AT_FLOOR,
        "with the number that `locate_nonfinite` gives",
        lambda: scale_that_holds(**AT_FLOOR),
        located="A loss scale of at most",
        backends=NOT_TF,
        float32=AT_FLOOR,
    ),
]


def windows(steps):
    return {
        "loss": sometimes_broken,
        "data": flagged(*range(0, steps, 4), data=lambda: regression(steps)),
        "inner": {"gradient_accumulation_steps": 4},
        "scaled": {"on_overflow": "drop_window"},
        "epochs": 6,
    }


OF_STANDSTILL = [
    A(
        "NothingToTrain",
        "Set layer.trainable = True for some of them, and compile the model again",
        "all layers were frozen",
        {"prepare": freeze()},
        "as it says",
        {"prepare": USUAL["prepare"]},
    ),
    A(
        "NothingToTrain",
        "Look for an axis of size 0",
        "a layer that keeps none of the features",
        {"layers": lambda: [layers.Lambda(lambda x: x[:, :0]), head(use_bias=False)]},
        "it keeps four",
        {"layers": lambda: [layers.Lambda(lambda x: x[:, :4]), head(use_bias=False)]},
    ),
    A(
        "NothingToTrain",
        "add a layer that has some, such as keras.layers.Dense",
        "a model that only averages",
        {"layers": lambda: [layers.Reshape((8, 1)), layers.GlobalAveragePooling1D()]},
        "with a `Dense` after it",
        {"layers": lambda: [layers.Reshape((8, 1)), layers.GlobalAveragePooling1D(), head()]},
    ),
    A(
        "NoSteps",
        "write self.optimizer.apply(gradients, self.trainable_variables)",
        "a `train_step` that forgets the optimizer",
        {"model": Forgetful, "prepare": forget},
        "as it says",
        {"prepare": remember},
    ),
    A(
        "NoSteps",
        "Write drop_remainder=False",
        "a dataset of fewer examples than a batch",
        lambda: in_one_batch(True),
        "as it says",
        lambda: in_one_batch(False),
        backends=("tensorflow",),
        tolerance=0,
    ),
    A(
        "UnscaledLoss",
        "write loss = self.optimizer.scale_loss(loss)",
        "a `train_step` that forgets to scale the loss",
        {"model": Forgetful, "prepare": unscaled},
        "as it says",
        {"prepare": remember},
    ),
    A(
        "UnscaledLoss",
        'or kmp.scaled(..., loss_scale="none")',
        "a `train_step` that forgets to scale the loss, in bfloat16",
        {"model": Forgetful, "prepare": unscaled, "policy": "mixed_bfloat16"},
        "as it says",
        {"scaled": {"loss_scale": "none"}},
    ),
    *(
        A(
            "ClippedWhileScaled",
            f"give the optimizer {way}=1, which clips them after the division",
            f"a `train_step` clips {of}",
            {"model": Forgetful, "prepare": clips(how), "optimizer": "sgd", "epochs": 8},
            "as it says",
            {"prepare": remember, "inner": {way: 1.0}},
        )
        for how, way, of in (
            (
                "all",
                "global_clipnorm",
                "the scaled gradients of all weights together to a norm of 1",
            ),
            ("each", "clipnorm", "the scaled gradients of each weight to a norm of 1"),
            ("value", "clipvalue", "each number of the scaled gradients to 1"),
        )
    ),
    A(
        "FrozenWeights",
        "Set it, or look at where its schedule ends",
        "a learning rate of 0",
        {"rate": 0.0},
        "0.01",
        {"rate": 0.01},
        quick=True,
    ),
    A(
        "FrozenWeights",
        "look at where its schedule ends",
        "a schedule that ends after 10 steps",
        {"rate": lambda: schedules.PolynomialDecay(0.01, 10, end_learning_rate=0.0)},
        "after 1,000",
        {"rate": lambda: schedules.PolynomialDecay(0.01, 1000, end_learning_rate=0.0)},
    ),
    A(
        "FrozenWeights",
        'Keep them in float32: the policy "mixed_bfloat16"',
        "bfloat16 weights, rounded to nearest, at a learning rate of 1e-5",
        {
            "policy": "bfloat16",
            "rate": 1e-5,
            "scaled": {"loss_scale": "none", "rounding": "nearest"},
        },
        "as it says",
        {"policy": "mixed_bfloat16"},
    ),
    A(
        "FrozenWeights",
        "Or write kmp.scaled(..., master_weights=True)",
        "bfloat16 weights, rounded to nearest, at a learning rate of 1e-5",
        {
            "policy": "bfloat16",
            "rate": 1e-5,
            "scaled": {"loss_scale": "none", "rounding": "nearest"},
            "prepare": start_alike,
        },
        "as it says",
        {"scaled": {"loss_scale": "none", "master_weights": True}},
    ),
    A(
        "FrozenWeights",
        "Raise it: float32 rounds such updates away",
        "a learning rate of 1e-12",
        {"rate": 1e-12},
        "0.01",
        {"rate": 0.01},
    ),
    A(
        "FrozenWeights",
        "Raise it: float32 rounds such updates away",
        "weights in bfloat16, at a learning rate of 1e-11",
        {"policy": "bfloat16", "scaled": {"loss_scale": "none"}, "rate": 1e-11},
        "0.01",
        {"rate": 0.01},
    ),
    A(
        "FrozenWeights",
        "Look at what holds them back: clipnorm, global_clipnorm, clipvalue",
        "gradients are clipped at 1e-12",
        {"optimizer": "sgd", "inner": {"clipvalue": 1e-12}},
        "at 1",
        {"inner": {"clipvalue": 1.0}},
    ),
    *(
        A(
            detector,
            'on_overflow="drop_micro_batch" trains on the other micro-batches',
            f"epochs of {steps} steps; each window of four micro-batches has a gradient of NaN",
            windows(steps),
            "as it says: they train, and the verdict names what is still to be mended",
            {"scaled": {"on_overflow": "drop_micro_batch"}, "epochs": 8},
            state="UNSTABLE",
            float32={**windows(steps), "loss": always_whole, "epochs": 8},
            tolerance=2.0,  # without a quarter of the data
        )
        for detector, steps in (("AllSkipped", 40), ("FrozenWeights", 20))
    ),
    A(
        "FrozenWeights",
        "on such a batch names the layer, or a loss scale if one can hold it",
        "epochs of 20 steps; each window of four micro-batches has a gradient of NaN",
        windows(20),
        "the loss was mended",
        {"loss": always_whole},
        located="loss",
    ),
    A(
        "VanishedWeights",
        "Weight decay or a regularizer has taken them to nothing: lower it",
        "a weight decay of 20, and targets that are noise",
        {
            "optimizer": "adamw",
            "inner": {"weight_decay": 20.0},
            "data": noise,
            "layers": lambda: [hidden(), hidden(name="middle"), head()],
            "epochs": 6,
        },
        "of 0.004, the default",
        {"inner": {"weight_decay": 0.004}},
    ),
    A(
        "ZeroGradients",
        "relu units that are all dead",
        "a bias of -100 before the first relu",
        {"layers": relus, "prepare": dead},
        "of 0",
        {"prepare": USUAL["prepare"]},
    ),
    A(
        "ZeroGradients",
        "weights that all begin at zero",
        "all kernels are zero",
        {"layers": relus, "prepare": all_zero},
        "drawn at random",
        {"prepare": USUAL["prepare"]},
    ),
    A(
        "ZeroGradients",
        "a softmax over a single unit",
        "the model ends in a softmax over one unit",
        {"layers": lambda: [hidden(), head(activation="softmax")]},
        "without softmax",
        {"layers": usual},
    ),
    A(
        "InsensitiveLoss",
        "for outputs that are saturated",
        "the bias of a last tanh is 7.5",
        {
            "layers": lambda: [hidden(), head(activation="tanh")],
            "prepare": saturate_head,
            "optimizer": "sgd",
        },
        "the bias is 0",
        {"prepare": lambda model: None},
    ),
    A(
        "InsensitiveLoss",
        "targets that are far larger than the outputs: divide them by a constant",
        "the targets are ten million times as large",
        {"policy": "mixed_bfloat16", "data": huge_targets},
        "as it says",
        {"data": regression},
    ),
    A(
        "ZeroGradients",
        "or a loss or sample weights of zero",
        "all samples weigh nothing",
        {"data": weighing(0.0)},
        "1",
        {"data": regression},
    ),
    A(
        "ZeroGradients",
        "end the model with kmp.layers.Float32OutputDense, and write from_logits=True",
        "a softmax in float16 that is exactly 0 or 1",
        SOFTMAX,
        "as it says",
        {"layers": lambda: [hidden(), head(4)], "loss": LOGITS},
    ),
    A(
        "ZeroGradients",
        "write kmp.DynamicLossScale(initial_scale=2.0**24)",
        "samples weigh 2**-42",
        {**TINY, "layers": one_layer},
        "as it says, and then what UNDERFLOW says",
        lambda: follow(WRITTEN, with_scale(2.0**24, {**TINY, "layers": one_layer}))(),
        float32={**TINY, "layers": one_layer},
    ),
    A(
        "ZeroGradients",
        "They do not learn: look for relu units that are all dead",
        "a bias of -100 before the first of two relus",
        {"layers": relus, "prepare": dead_half, "policy": "mixed_bfloat16"},
        "of 0",
        {"prepare": USUAL["prepare"]},
    ),
    A(
        "ZeroGradients",
        "or ops.stop_gradient",
        "`ops.stop_gradient` after the second of three layers",
        {
            "layers": lambda: [
                hidden(),
                hidden(name="middle"),
                layers.Lambda(ops.stop_gradient),
                head(),
            ]
        },
        "without it",
        {"layers": lambda: [hidden(), hidden(name="middle"), head()]},
        backends=("jax",),  # elsewhere such weights have no gradient at all
    ),
    A(
        "ZeroGradients",
        "Where it is meant, set layer.trainable = False",
        "`ops.stop_gradient` after the second of three layers",
        {
            "layers": lambda: [
                hidden(),
                hidden(name="middle"),
                layers.Lambda(ops.stop_gradient),
                head(),
            ]
        },
        "as it says, for both",
        {"prepare": freeze("hidden", "middle")},
        backends=("jax",),
    ),
]

# Gradients that SGD makes steps of the usual size of.
FAINT = {"data": weighing(1e-10), "optimizer": "sgd", "rate": 1e9}
LOST = {"data": weighing(1e-7), "optimizer": "sgd", "rate": 1e6}


LION = {"optimizer": "lion", "rate": 0.003, **FLOAT32}


def random_classes():
    """Classes that nothing tells from one another."""
    x, _, weights = regression()
    return x, np.random.default_rng(1).integers(0, 4, len(x)), weights


def explained():
    """The run without the batch, once its targets are named."""
    x, y, _ = huge("y", 1e6, at=10)()
    bad, other = slice(10 * BATCH, 11 * BATCH), slice(9 * BATCH, 10 * BATCH)
    model = compiled({**USUAL, **FLOAT32})
    found = kmp.debug.explain_spike(model, x[bad], y[bad], (x[other], y[other]))
    assert [each.name for each in found.columns] == ["y[..., 0]"], str(found)
    return train(**FLOAT32)


def with_scale(rule, situation):
    return {**situation, "scaled": {"loss_scale": rule}}


def apart(x, y, weights):
    """Most batches weigh next to nothing, and one so much that float16 overflows."""
    weights[:] = 1e-6
    weights[20] = 1e3


APART = {"data": with_fault(apart), "optimizer": "lion", "rate": 0.003, "epochs": 6}
WRITTEN = r"Write (kmp\.DynamicLossScale\([^)]*\))"


def large():
    """Inputs ten thousand times as large."""
    x, y, weights = classes()
    return x * np.float32(1e4), y, weights


def several(x, y, weights):
    """Many batches are bad."""
    x[5::3] *= np.float32(1e4)
    y[5::3] = (y[5::3] + 1) % 4


def one_bad(x, y, weights):
    x[30] *= np.float32(1e4)
    y[30] = (y[30] + 1) % 4


CLASSIFIER = {
    "layers": lambda: [hidden(32, activation="relu"), head(4)],
    "loss": LOGITS,
    "data": classes,
    "optimizer": "sgd",
    "rate": 0.05,
    "scaled": {"spikes": "skip"},
    **FLOAT32,
}
LARGER = {
    **CLASSIFIER,
    "layers": lambda: [hidden(32, activation="leaky_relu"), head(4)],
    "optimizer": "adam",
    "rate": 1e-3,
    "evaluate_on": large,
}

FAR_APART = {"layers": lambda: [hidden(), layers.Rescaling(1e-5, dtype="float32"), head()]}


def sunk(growth_interval, epochs=2):
    """A scale that is far below where it began, for reasons that nobody knows any more."""
    rule = kmp.DynamicLossScale(2.0**24, growth_interval=growth_interval)
    settings = {**USUAL, "data": weighing(1e-2), "scaled": {"loss_scale": rule}}
    with heard() as texts:
        model = compiled(settings)
        model.optimizer.build(model.trainable_variables)
        model.optimizer.scale_variable.assign(2.0**-9)
        watch = kmp.callbacks.GradientHealth(update_freq=10)
        fit(model, settings, [watch], epochs=epochs)
    said = "\n".join([str(watch.verdict), *texts])
    return Outcome(said, watch.verdict.state, loss_in_float32(model, settings))


OF_SIZES = [
    A(
        "ExplodingGradients",
        "Lower the learning rate, or clip with global_clipnorm=1.0",
        "SGD at a learning rate of 0.3 on targets of 100",
        {"optimizer": "sgd", "rate": 0.3, "data": large_targets, **FLOAT32},
        "0.003",
        {"rate": 0.003},
    ),
    A(
        "ExplodingGradients",
        "or clip with global_clipnorm=1.0",
        "SGD at a learning rate of 0.3 on targets of 100",
        {"optimizer": "sgd", "rate": 0.3, "data": large_targets, **FLOAT32},
        "as it says",
        {"inner": {"global_clipnorm": 1.0}},
    ),
    A(
        "LargeUpdates",
        "Lower the learning rate",
        "SGD on weights that begin small, at a learning rate of 0.5, and targets that are noise",
        {"rate": 0.5, "optimizer": "sgd", "data": noise, **FLOAT32},
        "0.01",
        {"rate": 0.01},
    ),
    A(
        "RisenLoss",
        "Begin again with a lower learning rate",
        "Adagrad at a learning rate of 100",
        {"optimizer": "adagrad", "rate": 100.0, **FLOAT32},
        "0.1",
        {"rate": 0.1},
    ),
    A(
        "RisenLoss",
        "Begin again with a lower learning rate",
        "a cross-entropy, and AdamW at a learning rate of 0.3",
        {
            "layers": lambda: [hidden(32), hidden(32, name="second"), head(4)],
            "loss": LOGITS,
            "data": random_classes,
            "optimizer": "adamw",
            "rate": 0.3,
            **FLOAT32,
        },
        "0.003",
        {"rate": 0.003},
    ),
    A(
        "HugeBatch",
        'or from a checkpoint from before, with kmp.scaled(..., spikes="skip"), which leaves '
        "such a step out",
        "a batch of each epoch weighs 1e8, and Adam remembers it",
        {"data": huge("w", 1e8), **FLOAT32},
        "as it says",
        {"scaled": {"spikes": "skip"}},
        float32={},
        quick=True,
    ),
    A(
        "HugeBatch",
        "If its samples are rare and weigh much, begin again with global_clipnorm=1.0",
        "the eleventh batch of each epoch weighs 1e8",
        {"data": huge("w", 1e8, at=10), **FLOAT32},
        "as it says",
        {"inner": {"global_clipnorm": 1.0}},
        float32={},
    ),
    A(
        "HugeBatch",
        'in "mixed_bfloat16", where its gradients do not overflow',
        "a batch of each epoch weighs 1e4; its steps overflow in float16 until the tenth",
        {"data": huge("w", 1e4), "epochs": 12},
        "as it says",
        {"policy": "mixed_bfloat16", "inner": {"global_clipnorm": 1.0}},
    ),
    A(
        "HugeBatch",
        "begin again without it",
        "the eleventh batch of each epoch weighs 1e8",
        {"data": huge("w", 1e8, at=10), **FLOAT32},
        "it was left out",
        {"data": regression},
    ),
    A(
        "HugeBatch",
        "compile the model with a new optimizer",
        "a batch weighs 1e8, and Lion goes on in its direction",
        lambda: resumed({"data": huge("w", 1e8, at=10)}, **LION),
        "as it says",
        lambda: resumed({"data": huge("w", 1e8, at=10)}, "new optimizer", **LION),
        float32={**LION, "epochs": 4},
        tolerance=2.5,  # 29 steps went astray
    ),
    A(
        "HugeBatch",
        "kmp.debug.explain_spike(model, x, y, (other_x, other_y)) tells what is unusual about that",
        "the targets of the eleventh batch of each epoch are 1e6 times as large",
        {"data": huge("y", 1e6, at=10), **FLOAT32},
        "asked; it names the targets, and the batch was left out",
        explained,
        float32={},
    ),
    A(
        "RisenLoss",
        'if a single batch did it, with kmp.scaled(..., spikes="skip")',
        "SGD with momentum, and a batch that weighs 1000",
        {"optimizer": "sgd", "inner": {"momentum": 0.9}, "data": huge("w", 1e3), **FLOAT32},
        "as it says",
        {"scaled": {"spikes": "skip"}},
    ),
    A(
        "Underflow",
        'Write loss_scale="dynamic"',
        "samples weigh 1e-5, at a fixed scale of 1",
        with_scale(1.0, {"data": weighing(1e-5), "optimizer": "sgd", "rate": 1e4}),
        "as it says",
        {"scaled": {"loss_scale": "dynamic"}},
        quick=True,
    ),
    A(
        "Underflow",
        "Write kmp.DynamicLossScale(initial_scale=2.0**",
        "samples weigh 1e-7, at a fixed scale of 1",
        with_scale(1.0, LOST),
        "as it says",
        follow(WRITTEN, with_scale(1.0, LOST)),
        float32=LOST,
    ),
    A(
        "Underflow",
        "Write kmp.DynamicLossScale(initial_scale=2.0**",
        "samples weigh 2**-42, at a fixed scale of 2**24",
        with_scale(2.0**24, TINY),
        "as it says",
        follow(WRITTEN, with_scale(2.0**24, TINY)),
        float32=TINY,
    ),
    A(
        "Underflow",
        "Write kmp.AmaxLossScale(headroom_bits=1)",
        "a headroom of 15 bits, and a layer whose gradients are 1e-5 of the next one's",
        with_scale(kmp.AmaxLossScale(headroom_bits=15), FAR_APART),
        "as it says",
        {"scaled": {"loss_scale": kmp.AmaxLossScale(headroom_bits=1)}},
    ),
    A(
        "Underflow",
        "Write kmp.DynamicLossScale(initial_scale=2.0**",
        "samples weigh 1e-10",
        FAINT,
        "as it says",
        follow(WRITTEN, FAINT),
        float32=FAINT,
    ),
    A(
        "Underflow",
        "or wait for it to grow",
        "samples weigh 1e-2, and the scale begins at 2**-9",
        with_scale(kmp.DynamicLossScale(2.0**-9, growth_interval=20), {"data": weighing(1e-2)}),
        "six more epochs",
        {"epochs": 9},
    ),
    A(
        "Underflow",
        "or more often with a lower growth_interval",
        "samples weigh 1e-2, and the scale has sunk to 2**-9",
        lambda: sunk(2000),
        "a growth_interval of 10, and twelve epochs",
        lambda: sunk(10, epochs=12),
        float32={"data": weighing(1e-2), "epochs": 12},
    ),
    A(
        "Underflow",
        'In "mixed_bfloat16" with loss_scale="none" both batches count',
        "one batch weighs 1,000, and the others 1e-6",
        APART,
        "as it says",
        {"policy": "mixed_bfloat16", "scaled": {"loss_scale": "none"}},
        backends=NOT_TF,
        tolerance=1.5,
    ),
    A(
        "Underflow",
        "leaves out those that overflow",
        "one batch weighs 1,000, and the others 1e-6",
        APART,
        "as it says",
        follow(r"(kmp\.DynamicLossScale\([^)]*min_scale[^)]*\))", APART),
        backends=NOT_TF,
        float32={**APART, "data": weighing(1e-6)},
    ),
]
OF_SPIKES = [
    A(
        "SpikeBudget",
        "If the data have changed, go on: the limit has followed them",
        "inputs that are 1e4 times as large from the fourth epoch on",
        lambda: resumed({"data": large}, **LARGER),
        "a fifth epoch of them",
        lambda: resumed({"data": large}, "go on", **LARGER),
        float32={**LARGER, "data": large, "epochs": 2},
    ),
    A(
        "SpikeBudget",
        "If many batches are bad, look at them",
        "every third batch of an epoch is 1e4 times as large",
        lambda: resumed({"data": with_fault(several, classes)}, **CLASSIFIER),
        "they were left out",
        lambda: resumed({"data": classes}, **CLASSIFIER),
        float32={**CLASSIFIER, "epochs": 4},
    ),
    A(
        "told_spikes",
        "Look at the batches of the spikes: they are bad, or rare and important",
        "one batch is 1e4 times as large",
        lambda: resumed({"data": with_fault(one_bad, classes)}, **CLASSIFIER),
        "it was left out",
        lambda: resumed({"data": classes}, **CLASSIFIER),
        float32={**CLASSIFIER, "epochs": 4},
    ),
]


# What `audit` finds


def bare(optimizer, **ignored):
    """As it is, without kmp and without Keras's wrapper."""
    return optimizer


BARE = {"wrap": bare, "compile": {"auto_scale_loss": False}}
PURE = {"policy": "bfloat16", "scaled": {"loss_scale": "none"}, "rate": 1e-3, "epochs": 6}


def pixels():
    """Raw inputs in the hundred thousands, whose differences are what counts."""
    x, y, weights = regression()
    return x + np.float32(1e5), y, weights


def ids():
    """Numbers of words beyond what float16 counts, as floats."""
    x = np.random.default_rng(0).integers(2048, 2560, (STEPS * BATCH, 4))
    return x.astype("float32"), (x % 2).mean(1, keepdims=True), np.ones(len(x), "float32")


def prices():
    """Around 30,000, where float16 holds every sixteenth number."""
    x, y, weights = regression()
    return 30000 + 10 * x, y, weights


def normalized_prices(**dtype):
    return [layers.BatchNormalization(momentum=0.5, name="normalization", **dtype), *usual()]


def averaged(**dtype):
    """The inputs again, as averages of 56 by 56 pixels."""
    pool = layers.AveragePooling2D(56, name="pool", **dtype)
    return [layers.Reshape((1, 1, 8)), layers.UpSampling2D(56), pool, layers.Flatten(), *usual()]


def looked_up(**dtype):
    words = layers.Embedding(2560, 4, name="words")
    return [layers.Reshape((4,), **dtype), words, layers.Flatten(), head()]


def at_320():
    x, y, weights = regression()
    return x, y + 320, weights


def shared(epsilon, **dtype):
    def share(x):
        x = ops.relu(x)
        return x / (ops.sum(x, axis=-1, keepdims=True) + epsilon)

    # Rows of zeros are what the epsilon is for.
    return [layers.Dense(8, "relu"), layers.Lambda(share, name="share", **dtype), head()]


def unit(**dtype):
    return [layers.Dense(8, "relu"), layers.UnitNormalization(**dtype), head()]  # zeros as above


class Unit(layers.Layer):
    """Vectors of length 1 times a matrix, by code of its own."""

    def __init__(self, mends=False, **kwargs):
        super().__init__(**kwargs)
        self.mends = mends

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 8))

    def call(self, x):
        sums = ops.sum(ops.square(ops.cast(x, "float32") if self.mends else x), -1, keepdims=True)
        return ops.matmul(x * ops.cast(ops.rsqrt(sums + 1e-3), x.dtype), self.kernel)


class Pooled(layers.Layer):
    """The mean of 3000 nodes by their sum, where the nodes are copies of one number."""

    def __init__(self, mends=False, has_weights=False, **kwargs):
        super().__init__(**kwargs)
        self.mends, self.has_weights = mends, has_weights

    def build(self, shape):
        if self.has_weights:
            self.gain = self.add_weight(name="gain", shape=(), initializer="ones")

    def call(self, x):
        nodes = ops.repeat(ops.transpose(x), 3000, axis=0)
        nodes = ops.cast(nodes, "float32") if self.mends else nodes
        sums = ops.segment_sum(nodes, np.repeat(np.arange(8), 3000), 8)
        mean = ops.cast(ops.transpose(sums) / 3000, x.dtype)
        return mean * self.gain if self.has_weights else mean


class Kind(layers.Layer):
    """Adds the row of a table that says whether the first number of a sample is above 1."""

    def __init__(self, mend=lambda table: table, **kwargs):
        super().__init__(**kwargs)
        self.mend = mend

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(2, shape[-1]))

    def call(self, x):
        is_above = ops.cast(x[:, 0] > 1, "int32")
        rows = ops.take(self.mend(ops.tanh(self.table)), is_above, axis=0)
        return x + ops.cast(rows, x.dtype)


class Centred(layers.Layer):
    """Subtracts 2,049, a number of its own that float16 has not, from numbers around it."""

    def __init__(self, mends=False):
        super().__init__(autocast=False)
        self.mends = mends

    def build(self, shape):
        begins = keras.initializers.Constant(2049.0)
        settings = {"autocast": False} if self.mends else {}
        self.center = self.add_weight((), begins, trainable=False, name="center", **settings)

    def call(self, x):
        return ops.cast(x, "float32") + 2049.0 - ops.cast(self.center, "float32")


def of_kinds(*mend, **arguments):
    return [layers.Dense(8, "relu"), Kind(*mend, **arguments), head()]


def over_steps(policy="mixed_bfloat16", **arguments):
    """The same numbers at 512 steps; the head gets the mean of the outputs."""
    recurrent = layers.GRU(4, return_sequences=True, **{"dtype": policy, **arguments})
    mean = layers.GlobalAveragePooling1D(dtype="float32")
    return [layers.Dense(8, "relu"), layers.RepeatVector(512), recurrent, mean, head()]


def pooled(**arguments):
    first = layers.Dense(8, "relu", bias_initializer="ones")
    return [first, Pooled(**arguments), head()]


def normed(norm):
    """512 numbers of some 20, whose squares add up to 200,000, and what makes a norm of them 1."""
    wide = layers.Dense(512, "relu", kernel_initializer=keras.initializers.RandomNormal(stddev=10))
    return [wide, norm, head()]


def masked(number, **dtype):
    def mask(x):
        return ops.softmax(x + ops.cast(x < 0, x.dtype) * number)

    return [hidden(), layers.Lambda(mask, name="mask", **dtype), head()]


def preprocessed(**dtype):
    return [layers.Rescaling(1.0, -1e5, name="center", **dtype), *usual()]


def converted(**changes):
    """A float32 model that `to_mixed_precision` has converted."""
    settings = {**USUAL, **changes, "policy": "float32"}
    with heard() as texts:
        model = compiled(settings)
        kmp.to_mixed_precision(model, "mixed_float16")
        found = kmp.audit(model)
        rest = found.of_kind("half gradient")  # which a callback cures
        assert found.findings == rest, str(found)
        watch = kmp.callbacks.GradientHealth(**settings["watch"])
        fit(model, settings, [watch])
    said = "\n".join([str(watch.verdict), *texts])
    return Outcome(said, watch.verdict.state, loss_in_float32(model, settings))


def follows(policy, converted_to="", filter_fn=None):
    """How wrong the way is that weights go which follow others by small steps."""
    keras.config.set_dtype_policy(policy)
    model = Follower()
    if converted_to:
        kmp.to_mixed_precision(model, converted_to, filter_fn)
    found = kmp.audit(model).of_kind("frozen weights")
    wrong = abs(share_moved(model) - MOVED)
    return Outcome("\n".join(map(str, found)), "found" if found else "clean", wrong)


def on_a_tpu(policy):
    with mock.patch.object(backend, "platform", return_value="tpu"):
        return audited("float16 on a TPU", policy=policy)


def metric(last):
    """How far the mean squared error that Keras reports is from that in NumPy."""
    settings = {**USUAL, "layers": lambda: [hidden(), last()], "data": at_320, "policy": "float16"}
    settings = {**settings, "policy": "mixed_float16", "compile": {"metrics": ["mse"]}}
    with heard():
        model = compiled(settings)
        x, y, _ = at_320()
        found = model.evaluate(x, y, verbose=0, return_dict=True)["mse"]
        true = float(np.mean((np.asarray(model.predict(x, verbose=0), "float64") - y) ** 2))
        said = str(kmp.audit(model))
    return Outcome(said, "found" if "half metric" in said else "clean", abs(found / true - 1))


def predicted_years(last):
    """Which share of 31 years cannot be told apart in what a regression predicts."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    ends = {"kernel_initializer": "ones", "bias_initializer": keras.initializers.Constant(2000)}
    with heard():
        model = keras.Sequential([keras.Input((1,)), last(1, **ends)])
        model.compile(kmp.scaled("adam"), "mse")
        years = model.predict(np.arange(31.0, dtype="float32")[:, None], verbose=0)
        said = str(kmp.audit(model))
    told = len(np.unique(years.astype("float32")))
    return Outcome(said, "found" if "half output" in said else "clean", 1 - told / 31)


def under_floatx(name):
    keras.config.set_floatx(name)
    try:
        said = audited("half loss", loss=keras.losses.mean_squared_error)
    finally:
        keras.config.set_floatx("float32")
    return said


class Itself(keras.Sequential):
    """A model whose own code adds a loss, and counts in a variable of its own."""

    adds, counts, mends = False, False, False

    def build(self, input_shape=None):
        if self.counts and not hasattr(self, "seen"):
            reads = {"autocast": False} if self.mends else {}
            self.seen = self.add_weight(shape=(), trainable=False, name="seen", **reads)
        super().build(input_shape)

    def call(self, x, training=None, mask=None):
        seen = self.layers[0](x)
        if self.adds:
            loss = 1e-4 * ops.mean(ops.square(seen))
            self.add_loss(ops.cast(loss, "float32") if self.mends else loss)
        if self.counts:
            self.seen.assign(self.seen + 1.0)
        return self.layers[1](seen)


def model_itself(**does):
    """What the report of a conversion says of the model's own code, or a run if that is nothing."""
    kind = type("Itself", (Itself,), does)
    settings = {**USUAL, "model": kind, "policy": "float32"}
    with heard() as texts:
        model = compiled(settings)
        report = kmp.to_mixed_precision(model, "mixed_float16")
        if report.rounded:
            return Outcome(str(report), "found", np.nan)
        watch = kmp.callbacks.GradientHealth(**settings["watch"])
        fit(model, settings, [watch])
        if "counts" in does:
            assert float(model.seen) >= STEPS * settings["epochs"]
    said = "\n".join([str(watch.verdict), *texts])
    figure = loss_in_float32(Trained(model), settings)
    return Outcome(said, watch.verdict.state, figure)


class Trained(NamedTuple):
    """The weights of a model that are trained."""

    model: Any

    def get_weights(self):
        return [ops.convert_to_numpy(x) for x in self.model.trainable_weights]


def reloaded(**changes):
    """A run that goes on in a model that is loaded from a file."""
    settings = {**USUAL, **changes}
    with heard() as texts, tempfile.TemporaryDirectory() as folder:
        model = compiled(settings)
        texts += audited("lost on reload", **changes).splitlines()
        fit(model, settings, epochs=1)
        model.save(f"{folder}/model.keras")
        keras.config.set_dtype_policy("float32")  # as a new process begins
        model = keras.saving.load_model(f"{folder}/model.keras")
        fit(model, settings, epochs=2)
        scales = hasattr(model.optimizer, "inner_optimizer")
    said = "\n".join(texts)
    return Outcome(said, "scales" if scales else "lost", loss_in_float32(model, settings))


FLOAT32_LAYER = 'Give the layer dtype="float32"'
OF_AUDIT = [
    A(
        "audit: unscaled float16",
        "Compile with kmp.scaled(SGD, ...)",
        "SGD in float16 without a loss scale, samples weigh 1e-5",
        {**BARE, "data": weighing(1e-5), "optimizer": "sgd", "rate": 1e4},
        "as it says",
        {"wrap": kmp.scaled},
        quick=True,
    ),
    A(
        "audit: float16 on a TPU",
        'Use "mixed_bfloat16"',
        "float16 on a TPU (simulated)",
        lambda: Outcome(on_a_tpu("mixed_float16"), "found", np.nan),
        "as it says",
        lambda: (
            train(policy="mixed_bfloat16", scaled={"loss_scale": "none"})
            if not on_a_tpu("mixed_bfloat16")
            else None
        ),
        tolerance=1.5,
    ),
    A(
        "audit: half weights",
        "Compile with kmp.scaled(Adam, master_weights=True)",
        "bfloat16 weights under Keras's own Adam",
        {**PURE, **BARE},
        "as it says",
        {"wrap": kmp.scaled, "scaled": {"loss_scale": "none", "master_weights": True}},
    ),
    A(
        "audit: half weights",
        'or keep the weights in float32: build the model under "mixed_bfloat16"',
        "bfloat16 weights under Keras's own Adam",
        {**PURE, **BARE},
        "as it says",
        {"wrap": kmp.scaled, "policy": "mixed_bfloat16"},
    ),
    A(
        "audit: frozen weights",
        'Keep its weights in float32: build it under "mixed_bfloat16"',
        "a network in bfloat16 follows another one with a momentum of 0.999",
        lambda: follows("bfloat16"),
        "as it says",
        lambda: follows("mixed_bfloat16"),
        quick=True,
        state="clean",
        tolerance=0,
    ),
    A(
        "audit: frozen weights",
        "or exclude it with filter_fn when you convert the model",
        "a network in bfloat16 follows another one with a momentum of 0.999",
        lambda: follows("float32", "bfloat16"),
        "as it says",
        lambda: follows("float32", "bfloat16", lambda layer, path: "teacher" not in path),
        state="clean",
        tolerance=0,
    ),
    A(
        "audit: half gradient",
        "Give fit one of kmp's callbacks",
        "a batch has a word 5,120 times, and its gradient is a sum in bfloat16",
        FREQUENT,
        "as it says",
        lambda: watched(**FREQUENT),
        state="clean",
        float32=FREQUENT,
        backends=("jax",),
    ),
    A(
        "audit: half gradient",
        "or call kmp.protect(model)",
        "a batch has a word 5,120 times, and its gradient is a sum in bfloat16",
        FREQUENT,
        "as it says",
        lambda: protected(**FREQUENT),
        state="clean",
        float32=FREQUENT,
        backends=("jax",),
    ),
    A(
        "audit: half gradient",
        "or " + FLOAT32_LAYER.replace("G", "g"),
        "a batch has a word 5,120 times, and its gradient is a sum in bfloat16",
        FREQUENT,
        "as it says",
        {"layers": lambda: frequent(dtype="float32")},
        backends=("jax",),
    ),
    A(
        "audit: half gradient",
        "Give fit one of kmp's callbacks",
        "on a CPU the gradients of biases are added up in bfloat16",
        {"policy": "mixed_bfloat16"},
        "as it says",
        lambda: watched(policy="mixed_bfloat16"),
        state="clean",
        float32={},
        backends=("tensorflow", "jax"),
    ),
    A(
        "audit: half gradient",
        "Compile without run_eagerly=True and jit_compile=False, and give fit one of kmp's",
        "on a CPU the gradients of biases are added up in bfloat16",
        {"policy": "mixed_bfloat16", "compile": {"run_eagerly": True}},
        "as it says",
        lambda: watched(policy="mixed_bfloat16"),
        state="clean",
        float32={},
        backends=("tensorflow", "jax"),
    ),
    A(
        "audit: half gradient",
        "Write use_cudnn=False",
        "a GRU returns the outputs of 512 steps",
        {"layers": over_steps},
        "as it says",
        {"layers": lambda: over_steps(use_cudnn=False)},
        float32={"layers": lambda: over_steps("float32")},
        backends=("jax",),
    ),
    A(
        "audit: half gradient",
        "or " + FLOAT32_LAYER.replace("G", "g"),
        "a GRU returns the outputs of 512 steps",
        {"layers": over_steps},
        "as it says",
        {"layers": lambda: over_steps(dtype="float32")},
        float32={"layers": lambda: over_steps("float32")},
        backends=("jax",),
    ),
    A(
        "audit: half statistics",
        "Use kmp.layers.Float32BatchNormalization",
        "a batch normalization in bfloat16",
        {**PURE, "layers": lambda: [layers.BatchNormalization(), *usual()]},
        "as it says",
        {"layers": lambda: [kmp.layers.Float32BatchNormalization(), *usual()]},
        tolerance=2.0,  # weights in bfloat16 begin otherwise
    ),
    A(
        "audit: half softmax",
        "End in kmp.layers.Float32OutputDense without an activation",
        "a softmax in float16 that is exactly 0 or 1",
        SOFTMAX,
        "as it says",
        {"layers": lambda: [hidden(), head(4)], "loss": LOGITS},
    ),
    A(
        "audit: half loss",
        FLOAT32_LAYER.replace("layer", "loss"),
        "a loss that computes in float16, of targets of 320",
        {"loss": keras.losses.MeanSquaredError(dtype="float16"), "data": at_320, "rate": 0.3},
        "as it says",
        {"loss": keras.losses.MeanSquaredError(dtype="float32")},
    ),
    A(
        "audit: half loss",
        'Write keras.config.set_floatx("float32") before compiling',
        '`keras.config.set_floatx("float16")`',
        lambda: Outcome(under_floatx("float16"), "found", np.nan),
        "as it says",
        lambda: train() if not under_floatx("float32") else None,
    ),
    A(
        "conversion",
        'Write self.add_loss(keras.ops.cast(loss, "float32"))',
        "a model whose own code adds a loss, converted",
        lambda: model_itself(adds=True),
        "as it says",
        lambda: model_itself(adds=True, mends=True),
        float32={},
    ),
    A(
        "conversion",
        "Write self.add_weight(..., autocast=False) for it",
        "a model whose own code counts in a variable, converted",
        lambda: model_itself(counts=True),
        "as it says",
        lambda: model_itself(counts=True, mends=True),
        float32={},
        backends=("tensorflow", "torch"),  # JAX's trainer calls a model without its scope
    ),
    A(
        "audit: half metric",
        "Let the last layer return float32, for example kmp.layers.Float32OutputDense",
        "the mean squared error of float16 outputs against targets of 320, as a metric",
        lambda: metric(lambda: layers.Dense(1)),
        "as it says; how far the metric is from the one in NumPy",
        lambda: metric(head),
        state="clean",
        float32=None,
        tolerance=0.0,
    ),
    A(
        "audit: half output",
        "Let the last layer return float32, for example kmp.layers.Float32OutputDense",
        "the years from 2000 to 2030, predicted in bfloat16",
        lambda: predicted_years(layers.Dense),
        "as it says; the share of years that cannot be told apart",
        lambda: predicted_years(kmp.layers.Float32OutputDense),
        state="clean",
        float32=None,
        tolerance=0.0,
    ),
    A(
        "audit: activity regularizer",
        FLOAT32_LAYER,
        "an activity regularizer in float16",
        {"layers": lambda: [hidden(activity_regularizer="l2"), head()]},
        "as it says",
        {"layers": lambda: [hidden(activity_regularizer="l2", dtype="float32"), head()]},
    ),
    A(
        "audit: half preprocessing",
        FLOAT32_LAYER + ", or convert",
        "inputs of 1e5 are centered in float16",
        {"layers": preprocessed, "data": pixels},
        "as it says",
        {"layers": lambda: preprocessed(dtype="float32")},
    ),
    A(
        "audit: half preprocessing",
        "or convert the model with kmp.to_mixed_precision",
        "inputs of 1e5 are centered in float16",
        {"layers": preprocessed, "data": pixels},
        "as it says",
        lambda: converted(layers=preprocessed, data=pixels),
        float32={"layers": preprocessed, "data": pixels},
    ),
    A(
        "audit: half preprocessing",
        FLOAT32_LAYER + ", or convert",
        "prices around 30,000 are rounded to float16 before a batch normalization",
        {"layers": normalized_prices, "data": prices},
        "as it says",
        {"layers": lambda: normalized_prices(dtype="float32")},
    ),
    A(
        "audit: half preprocessing",
        "or convert the model with kmp.to_mixed_precision",
        "prices around 30,000 are rounded to float16 before a batch normalization",
        {"layers": normalized_prices, "data": prices},
        "as it says",
        lambda: converted(layers=normalized_prices, data=prices),
        float32={"layers": normalized_prices, "data": prices},
    ),
    A(
        "audit: rounded variables",
        "Write self.add_weight(..., autocast=False) for what it needs in float32.",
        "a layer with `autocast=False` subtracts a variable of 2,049 in float32",
        {"layers": lambda: [Centred(), hidden(), head()]},
        "as it says",
        {"layers": lambda: [Centred(mends=True), hidden(), head()]},
        backends=("jax",),
    ),
    A(
        "audit: half statistics",
        FLOAT32_LAYER + ", or convert",
        "an average pooling of 3,136 numbers adds them up in float16",
        {"layers": averaged},
        "as it says",
        {"layers": lambda: averaged(dtype="float32")},
        backends=("jax", "tensorflow"),  # PyTorch adds them up in float32
    ),
    A(
        "audit: half statistics",
        "or convert the model with kmp.to_mixed_precision",
        "an average pooling of 3,136 numbers adds them up in float16",
        {"layers": averaged},
        "as it says",
        lambda: converted(layers=averaged),
        float32={"layers": averaged},
        backends=("jax", "tensorflow"),
    ),
    A(
        "audit: half indices",
        FLOAT32_LAYER,
        "float ids beyond 2,048 pass a `Reshape` before an `Embedding`",
        {"layers": looked_up, "data": ids},
        "as it says",
        {"layers": lambda: looked_up(dtype="float32")},
    ),
    A(
        "audit: half indices",
        "or convert the model with kmp.to_mixed_precision",
        "float ids beyond 2,048 pass a `Reshape` before an `Embedding`",
        {"layers": looked_up, "data": ids},
        "as it says",
        lambda: converted(layers=looked_up, data=ids),
        float32={"layers": looked_up, "data": ids},
    ),
    A(
        "audit: sum of squares",
        FLOAT32_LAYER + ", or convert",
        "512 numbers of some 20 are normalized in float16",
        {"layers": lambda: normed(layers.UnitNormalization())},
        "as it says",
        {"layers": lambda: normed(layers.UnitNormalization(dtype="float32"))},
    ),
    A(
        "audit: sum of squares",
        "or convert the model with kmp.to_mixed_precision",
        "512 numbers of some 20 are normalized in float16",
        {"layers": lambda: normed(layers.UnitNormalization())},
        "as it says",
        lambda: converted(layers=lambda: normed(layers.UnitNormalization())),
        float32={"layers": lambda: normed(layers.UnitNormalization())},
    ),
    A(
        "audit: sum of squares",
        'Square keras.ops.cast(x, "float32") in place of x',
        "512 numbers of some 20 are normalized in float16, by a layer with a matrix",
        {"layers": lambda: normed(Unit())},
        "as it says",
        {"layers": lambda: normed(Unit(mends=True))},
    ),
    A(
        "audit: sum of squares",
        'or give the layer dtype="float32"',
        "512 numbers of some 20 are normalized in float16, by a layer with a matrix",
        {"layers": lambda: normed(Unit())},
        "as it says",
        {"layers": lambda: normed(Unit(dtype="float32"))},
    ),
    A(
        "audit: sum by index",
        'Give the layer dtype="float32"',
        "3000 numbers of some 1 are added up by index",
        {"layers": pooled},
        "as it says",
        {"layers": lambda: pooled(dtype="float32")},
        backends=("jax", "tensorflow"),
    ),
    A(
        "audit: sum by index",
        "or convert the model with kmp.to_mixed_precision",
        "3000 numbers of some 1 are added up by index",
        {"layers": pooled},
        "as it says",
        lambda: converted(layers=pooled),
        float32={"layers": pooled},
        backends=("jax", "tensorflow"),
    ),
    A(
        "audit: sum by index",
        'Add up keras.ops.cast(x, "float32") in place of x',
        "3000 numbers of some 1 are added up by index, by a layer with a weight",
        {"layers": lambda: pooled(has_weights=True)},
        "as it says",
        {"layers": lambda: pooled(has_weights=True, mends=True)},
        backends=("jax", "tensorflow"),
    ),
    A(
        "audit: sum by index",
        'or give the layer dtype="float32"',
        "3000 numbers of some 1 are added up by index, by a layer with a weight",
        {"layers": lambda: pooled(has_weights=True)},
        "as it says",
        {"layers": lambda: pooled(has_weights=True, dtype="float32")},
        backends=("jax", "tensorflow"),
    ),
    A(
        "audit: sum by index",
        'Look up in keras.ops.cast(x, "float32") in place of x',
        "a row of a table for each sample",
        {"layers": of_kinds},
        "as it says",
        {"layers": lambda: of_kinds(lambda x: ops.cast(x, "float32"))},
        backends=("jax",),
    ),
    A(
        "audit: sum by index",
        'or give the layer dtype="float32"',
        "a row of a table for each sample",
        {"layers": of_kinds},
        "as it says",
        {"layers": lambda: of_kinds(dtype="float32")},
        backends=("jax",),
    ),
    A(
        "audit: sum by index",
        'Look up in keras.ops.cast(x, "float32") * 1.0 in place of x',
        "a row of a table for each sample",
        {"layers": of_kinds},
        "as it says",
        {"layers": lambda: of_kinds(lambda x: ops.cast(x, "float32") * 1.0)},
        backends=("tensorflow",),
    ),
    A(
        "audit: epsilon",
        "Write 6e-05, or keep it in float32",
        "an epsilon of 1e-9 in float16",
        {"layers": lambda: shared(1e-9), "epochs": 6},
        "6e-05",
        {"layers": lambda: shared(6e-05)},
    ),
    A(
        "audit: epsilon",
        "or keep it in float32",
        "an epsilon of 1e-9 in float16",
        {"layers": lambda: shared(1e-9)},
        "as it says",
        {"layers": lambda: shared(1e-9, dtype="float32")},
    ),
    A(
        "audit: constant",
        "Use -32752",
        "a mask of -1e9 in float16",
        {"layers": lambda: masked(-1e9)},
        "as it says",
        {"layers": lambda: masked(-32752.0)},
    ),
    A(
        "audit: constant",
        "or keep it in float32",
        "a mask of -1e9 in float16",
        {"layers": lambda: masked(-1e9)},
        "as it says",
        {"layers": lambda: masked(-1e9, dtype="float32")},
    ),
    A(
        "audit: constant",
        'Give the layer dtype="float32"',
        "rows of zeros, normalized in float16",
        {"layers": lambda: unit()},
        "as it says",
        {"layers": lambda: unit(dtype="float32")},
    ),
    A(
        "audit: constant",
        "or convert the model with kmp.to_mixed_precision",
        "rows of zeros, normalized in float16",
        {"layers": lambda: unit()},
        "as it says",
        lambda: converted(layers=lambda: unit()),
        float32={"layers": lambda: unit()},
    ),
    A(
        "audit: lost on reload",
        "Compile with kmp.scaled(Adam, ...)",
        "Keras's own loss scaling, and a file in between",
        lambda: reloaded(wrap=bare, compile={}),
        "as it says",
        reloaded,
        state="scales",
    ),
    A(
        "audit: tensor cores",
        "Round 13 up to 16",
        "a hidden layer of 13 units",
        {"layers": lambda: [hidden(13), head(8), layers.Dense(1, dtype="float32")]},
        "as it says",
        {"layers": lambda: [hidden(16), head(8), layers.Dense(1, dtype="float32")]},
    ),
]

# What the tools of kmp.debug say


def report_of(step=0, **changes):
    return lambda: Outcome(located(step, **changes), "found", np.nan)


def penalized(factor, **dtype):
    return [hidden(activation=None), Penalty(factor, name="penalty", **dtype), head()]


class Penalty(layers.Layer):
    """Adds a sum of squares to the loss, times a factor."""

    def __init__(self, factor, **arguments):
        super().__init__(**arguments)
        self.factor = factor

    def call(self, x):
        self.add_loss(ops.cast(self.factor * ops.sum(ops.square(300 * x)), "float32"))
        return x


LOUD = {"layers": loud}
CUT = "Keep this layer in float32 (dtype='float32') or rescale"
OF_TOOLS = [
    A(
        "locate_nonfinite",
        CUT,
        "a layer multiplies by 1e6 in float16, and the next divides",
        report_of(**LOUD),
        'both with `dtype="float32"`',
        lambda: train(layers=lambda: loud(dtype="float32")),
    ),
    A(
        "locate_nonfinite",
        CUT,
        "a layer multiplies by 1e6 in float16, and the next divides",
        report_of(**LOUD),
        "by 100 instead",
        lambda: train(layers=lambda: loud(100.0)),
    ),
    A(
        "locate_nonfinite",
        "Look for a division by zero, a logarithm or root of a number that is not positive",
        "the logarithm of relu, in float16",
        report_of(layers=lambda: with_log(0.0)),
        "a hundredth was added before it",
        lambda: train(layers=lambda: with_log(0.01)),
        float32={"layers": lambda: with_log(0.01)},
    ),
    A(
        "locate_nonfinite",
        "0 below 6e-08, as an epsilon may be: kmp.audit(model) lists such constants",
        "an epsilon of 1e-9 in float16, and rows of zeros",
        report_of(3, layers=lambda: shared(1e-9), data=with_fault(zero_rows)),
        "the layer in float32",
        lambda: train(layers=lambda: shared(1e-9, dtype="float32"), data=with_fault(zero_rows)),
        float32={"layers": lambda: shared(1e-9), "data": with_fault(zero_rows)},
    ),
    A(
        "locate_nonfinite",
        "A loss scale of at most 0.0",
        "samples weigh 1e8",
        report_of(data=weighing(1e8)),
        "as it says",
        lambda: scale_that_holds(data=weighing(1e8)),
        float32={"data": weighing(1e8)},
    ),
    A(
        "locate_nonfinite",
        "or keep this layer in float32 (dtype='float32')",
        "vectors near zero are normalized in float16",
        report_of(layers=normalized, data=small_inputs, loss=LOGITS),
        "as it says",
        lambda: train(layers=lambda: normalized(dtype="float32"), data=small_inputs, loss=LOGITS),
        float32={"layers": normalized, "data": small_inputs, "loss": LOGITS},
    ),
    A(
        "locate_nonfinite",
        CUT + "; no loss scale can help",
        "a layer adds a sum of squares to the loss, in float16",
        report_of(layers=lambda: penalized(1e-6)),
        "as it says",
        lambda: train(layers=lambda: penalized(1e-6, dtype="float32")),
        float32={"layers": lambda: penalized(1e-6)},
        backends=NOT_TF,  # where such a fit raises
    ),
]


def diagnosed(cure):
    """A run of what `diagnose` keeps in float32, by one of the ways that it names."""
    settings = {**USUAL, "layers": big, "policy": "float32"}
    x, y, _ = (part[:BATCH] for part in regression())
    keras.utils.clear_session(free_memory=False)
    with heard() as texts:
        model = compiled(settings)
        found = kmp.debug.diagnose(model, x, y, "mixed_float16")
        texts.append(str(found))
        rule = kmp.DynamicLossScale(initial_scale=found.loss_scale)
        if cure == "convert":
            kmp.to_mixed_precision(model, found.policy)
        else:
            keras.utils.clear_session(free_memory=False)  # so that it has the same names
            model = built({**settings, "policy": found.policy, "layers": cure})
        model.compile(kmp.scaled(inner_optimizer(settings), rule), "mse")
        assert model.get_layer("hidden").compute_dtype == "float16"
        watch = kmp.callbacks.GradientHealth(**USUAL["watch"])
        fit(model, settings, [watch])
    said = "\n".join([str(watch.verdict), *texts])
    return Outcome(said, watch.verdict.state, loss_in_float32(model, settings))


def big(**dtype):
    """Numbers beyond float16 between layers without weights, of which one has no path."""
    activation = layers.Activation(lambda x: x * 1e6, name="loud", **dtype)
    return [hidden(), activation, layers.Rescaling(1e-6, name="down"), head()]


def undiagnosed():
    settings = {**USUAL, "layers": big, "policy": "float32"}
    x, y, _ = (part[:BATCH] for part in regression())
    with heard():
        found = kmp.debug.diagnose(compiled(settings), x, y, "mixed_float16")
    return Outcome(str(found), "found", np.nan)


OF_DIAGNOSIS = [
    A(
        "diagnose",
        "kmp.to_mixed_precision(model, report.policy) keeps them in float32",
        "an activation multiplies by 1e6, and the next layer divides",
        undiagnosed,
        "as it says, with the advised loss scale",
        lambda: diagnosed("convert"),
        float32={"layers": big},
    ),
    A(
        "diagnose",
        "a rebuilt model needs the same names, and dtype='float32' there",
        "an activation multiplies by 1e6, and the next layer divides",
        undiagnosed,
        "as it says, with the advised loss scale",
        lambda: diagnosed(lambda: big(dtype="float32")),
        float32={"layers": big},
    ),
]

# Warnings


def guarded(**changes):
    """A run under `TerminateOnNaN`."""
    settings = {**USUAL, **changes}
    with heard() as texts:
        model = compiled(settings)
        stop = kmp.callbacks.TerminateOnNaN(patience=5)
        fit(model, settings, [stop])
    state = "stopped" if stop.stopped_because else "finished"
    return Outcome("\n".join(texts), state, loss_in_float32(model, settings))


def swept(epochs, **arguments):
    """A run with the learning rate that `LearningRateFinder` suggests."""
    settings = {**USUAL, "optimizer": "sgd", "policy": "float32"}
    arguments = {"steps": 60, "min_lr": 1e-4, "max_lr": 1.0, **arguments}
    with heard() as texts:
        model = compiled(settings)
        finder = kmp.callbacks.LearningRateFinder(**arguments)
        if epochs is None:
            x, y, _ = regression()
            finder.find(model, x, y, batch_size=BATCH)
        else:
            fit(model, settings, [finder], epochs=epochs)
    if finder.suggestion is None or texts:
        return Outcome("\n".join(texts), "no suggestion", np.nan)
    return train(optimizer="sgd", policy="float32", rate=finder.suggestion)


def wrapped_late():
    """An optimizer that has been built around weights in bfloat16 before it was wrapped."""
    settings = {**USUAL, **PURE}
    with heard() as texts:
        model = built(settings)
        inner = inner_optimizer(settings)
        inner.build(model.trainable_variables)
        model.compile(kmp.scaled(inner, "none"), "mse")
        watch = kmp.callbacks.GradientHealth(update_freq=10)
        fit(model, settings, [watch])
    said = "\n".join([str(watch.verdict), *texts])
    return Outcome(said, watch.verdict.state, loss_in_float32(model, settings))


def convert_unscaled(**scaled):
    settings = {**USUAL, **UNSCALED, "policy": "float32", "scaled": scaled}
    with heard() as texts:
        model = compiled(settings)
        kmp.to_mixed_precision(model, "mixed_float16")
        watch = kmp.callbacks.GradientHealth(update_freq=10)
        fit(model, settings, [watch])
    said = "\n".join([str(watch.verdict), *texts])
    return Outcome(said, watch.verdict.state, loss_in_float32(model, settings))


HELD = {
    "layers": lambda: [layers.BatchNormalization(), *usual()],
    "scaled": {"spikes": "skip"},
    **FLOAT32,
}


class Telling(Forgetful):
    """Tells Keras the loss, as the warning asks."""

    tells = True


UNSCALED = {"data": weighing(1e-5), "optimizer": "sgd", "rate": 1e4}
PURE16 = {
    "policy": "float16",
    "rate": 1e-3,
    "epochs": 6,
    "layers": lambda: [hidden(), layers.Dense(1)],
}
AT_1 = {"loss_scale": kmp.DynamicLossScale(1.0, min_scale=1.0)}
OF_WARNINGS = [
    A(
        "warning: gradient norm above",
        "lower the learning rate, or clip with global_clipnorm=1.0",
        "SGD at a learning rate of 0.3 on targets of 100",
        {"optimizer": "sgd", "rate": 0.3, "data": large_targets, **FLOAT32},
        "0.003",
        {"rate": 0.003},
    ),
    A(
        "warning: gradient norm above",
        "Otherwise scale large targets down",
        "Adam on targets of 100,000",
        {"data": lambda: (*regression()[:1], 1e5 * regression()[1], regression()[2]), **FLOAT32},
        "of 1",
        {"data": regression},
    ),
    A(
        "warning: float16 without loss scaling",
        'Write kmp.scaled(..., loss_scale="dynamic")',
        'samples weigh 1e-5, with `loss_scale="none"`',
        {**UNSCALED, "scaled": {"loss_scale": "none"}},
        "as it says",
        {"scaled": {"loss_scale": "dynamic"}},
    ),
    A(
        "warning: float16 without loss scaling",
        "or train in bfloat16, which needs no loss scaling",
        'samples weigh 1e-5, with `loss_scale="none"`',
        {**UNSCALED, "scaled": {"loss_scale": "none"}},
        "as it says",
        {"policy": "mixed_bfloat16"},
    ),
    A(
        "warning: float16 without loss scaling",
        "Compile with kmp.scaled(..., loss_scale='dynamic')",
        'samples weigh 1e-5; `to_mixed_precision` under `loss_scale="none"`',
        lambda: convert_unscaled(loss_scale="none"),
        "as it says",
        lambda: convert_unscaled(loss_scale="dynamic"),
        float32=UNSCALED,
    ),
    A(
        "warning: batch statistics",
        "Look at the batches: their inputs are far larger than those before",
        'one batch is 1e9 times as large, under `spikes="skip"`',
        lambda: resumed({"data": huge("x", 1e9)}, **HELD),
        "it was left out",
        lambda: resumed({"data": regression}, **HELD),
        float32={**HELD, "epochs": 4},
    ),
    A(
        "warning: gradient spike",
        "Look at the batch: it is bad, or rare and important",
        "one batch is 1e4 times as large",
        lambda: resumed({"data": with_fault(one_bad, classes)}, **CLASSIFIER),
        "it was left out",
        lambda: resumed({"data": classes}, **CLASSIFIER),
        float32={**CLASSIFIER, "epochs": 4},
    ),
    A(
        "warning: nothing has scaled the loss",
        "train_step, write loss = self.optimizer.scale_loss(loss) before taking gradients",
        "a `train_step` that forgets to scale the loss",
        {"model": Forgetful, "prepare": unscaled},
        "as it says",
        {"prepare": remember},
    ),
    A(
        "warning: nothing has scaled the loss",
        'write kmp.scaled(..., loss_scale="none")',
        "a `train_step` that forgets to scale the loss, in bfloat16",
        {"model": Forgetful, "prepare": unscaled, "policy": "mixed_bfloat16"},
        "as it says",
        {"scaled": {"loss_scale": "none"}},
    ),
    A(
        "warning: no loss is seen",
        "self._loss_tracker.update_state(loss) in the one",
        "a `train_step` that does not tell Keras the loss",
        lambda: guarded(model=Forgetful, prepare=remember),
        "as it says",
        lambda: guarded(model=Telling, prepare=remember),
        state="finished",
    ),
    A(
        "warning: TerminateOnNaN",
        "Go back to a checkpoint, and compile with kmp.scaled(...), which skips such a step",
        "the targets of one batch are NaN, under Keras's own Adam",
        lambda: guarded(**BARE, data=with_fault(nan_targets), evaluate_on=regression, **FLOAT32),
        "as it says",
        lambda: guarded(data=with_fault(nan_targets), evaluate_on=regression, **FLOAT32),
        state="finished",
        tolerance=1.5,
    ),
    A(
        "warning: TerminateOnNaN",
        "look at the learning rate",
        "a learning rate that is NaN from a step on",
        lambda: guarded(optimizer="sgd", rate=lambda: Ends(30)),
        "the schedule was mended",
        lambda: guarded(optimizer="sgd", rate=0.01),
        state="finished",
        float32={"optimizer": "sgd"},
    ),
    A(
        "warning: TerminateOnNaN",
        "so that no loss scale can help: look at the data and the layers",
        "the logarithm of relu",
        lambda: guarded(layers=lambda: with_log(0.0)),
        "a hundredth was added before it",
        lambda: guarded(layers=lambda: with_log(0.01)),
        state="finished",
        float32={"layers": lambda: with_log(0.01)},
        tolerance=1.5,
    ),
    A(
        "warning: TerminateOnNaN",
        "the loss scale cannot fall any further: kmp.debug.locate_nonfinite(model, x, y)",
        "the gradient of the loss is NaN",
        lambda: guarded(loss=root_of_zero, scaled=AT_1),
        "the root was mended, in the loss, where `locate_nonfinite` finds it",
        lambda: guarded(loss=mended_root),
        state="finished",
        float32={"loss": mended_root},
    ),
    A(
        "warning: LearningRateFinder",
        "Write `epochs` that are enough for it",
        "60 points in an epoch of 40 steps",
        lambda: swept(1),
        "two epochs",
        lambda: swept(2),
        tolerance=2.0,
    ),
    A(
        "warning: LearningRateFinder",
        "or call finder.find(model, x, y), which does",
        "60 points in an epoch of 40 steps",
        lambda: swept(1),
        "as it says",
        lambda: swept(None),
        tolerance=2.0,
    ),
    A(
        "warning: LearningRateFinder",
        "Sweep another range, or more `steps`",
        "learning rates of at most 1e-9",
        lambda: swept(2, min_lr=1e-12, max_lr=1e-9),
        "from 1e-4 to 1",
        lambda: swept(2),
        tolerance=2.0,
    ),
    A(
        "warning: half memory",
        "Wrap an optimizer that is not built",
        "Adam was built, for weights in bfloat16, before it was wrapped",
        wrapped_late,
        "as it says",
        lambda: train(**PURE),
        float32=PURE,
        tolerance=2.0,  # weights in bfloat16 begin otherwise
    ),
    A(
        "warning: half memory",
        "Keep them in float32 with the policy mixed_float16",
        "weights in float16",
        PURE16,
        "as it says",
        {"policy": "mixed_float16"},
    ),
    A(
        "warning: half memory",
        "or in bfloat16",
        "weights in float16",
        PURE16,
        "as it says",
        {"policy": "bfloat16", "scaled": {"loss_scale": "none"}},
    ),
    A(
        "warning: half memory",
        "write kmp.scaled(..., master_weights=True)",
        "weights in float16",
        PURE16,
        "as it says",
        {"scaled": {"master_weights": True}},
        tolerance=1.5,  # weights in float16 begin otherwise
    ),
]
ROWS = [
    *OF_NUMBERS,
    *OF_OVERFLOWS,
    *OF_STANDSTILL,
    *OF_SIZES,
    *OF_SPIKES,
    *OF_AUDIT,
    *OF_TOOLS,
    *OF_DIAGNOSIS,
    *OF_WARNINGS,
]

# The page

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "lab" / "advice.md"
INTRODUCTION = """# Every advice, followed

What kmp says, a situation in which it says it, what was done as it says, and how the run was then.
The loss is that of the trained weights in float32 on sound data; beside it stands what plain Keras
reaches in float32 with what was done. A tool gives no loss. `tests/test_advice.py` runs these rows
on every backend, and fails where an advice in kmp has no row.

```bash
KERAS_BACKEND=jax python tests/advice.py     # writes this page, or what is missing in it
```

| from | advice | situation | what was done | before | after | in float32 |
|---|---|---|---|---|---|--:|
"""


def page(rows) -> str:
    """The page, from rows and what was seen of them."""
    return INTRODUCTION + "".join(line(*each) if len(each) > 1 else each[0] for each in rows)


def begins(row: Advice) -> str:
    """How the line of a row begins."""
    return f"| {' | '.join([row.of, row.says.strip('. '), row.situation, row.done])} | "


def line(row: Advice, before: Outcome, after: Outcome, oracle: float) -> str:
    was, now = (f"{x.state}{told(x.figure)}" for x in (before, after))
    return f"{begins(row)}{was} | {now} | {told(oracle).strip(', ')} |\n"


def told(loss: float) -> str:
    return "" if np.isnan(loss) else f", {loss:.3g}"


def main() -> None:
    """Run the rows that the page has not, or whose kind is named, and write the page."""
    seen = []
    known = PAGE.read_text().splitlines(keepends=True) if PAGE.exists() else []
    for row in ROWS:
        old = [each for each in known if each.startswith(begins(row))]
        if old and row.of not in sys.argv[1:]:
            seen.append(old)
        elif not row.backends or keras.backend.backend() in row.backends:
            before, after = row.was(), row.is_now()
            seen.append((row, before, after, row.oracle() if row.compared else np.nan))
            print(line(*seen[-1]), end="", flush=True)
    PAGE.write_text(page(seen))


if __name__ == "__main__":
    main()

"""Protection: a skipped step leaves nothing behind, and neither does the protection."""

import contextlib
import copy
import functools
import pickle

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from linear_runs import JIT, RATE, SPE, data, fit, linear_model

import kmp
from kmp._backend import backend
from kmp._keras.training import loss_tracker

pytestmark = [pytest.mark.filterwarnings("ignore:Step"), pytest.mark.slow]

GradientHealth, TerminateOnNaN = kmp.callbacks.GradientHealth, kmp.callbacks.TerminateOnNaN


class Counting(keras.layers.Layer):
    """State that is no weight: an integer, a float, and those of a layer that is frozen."""

    traces = 0

    def build(self, shape):
        settings = {"shape": (), "initializer": "zeros", "trainable": False}
        self.calls = self.add_weight(name="calls", dtype="int32", **settings)
        self.total = self.add_weight(name="total", aggregation="mean", **settings)

    def call(self, x, training=False):
        type(self).traces += 1
        if training:
            self.calls.assign(self.calls + 1)
            self.total.assign(self.total + ops.mean(x))
        return x


def stateful_model(optimizer=None, **compile_arguments):
    frozen = Counting(name="frozen")
    frozen.trainable = False
    layers = [
        keras.Input((2,)),
        keras.layers.BatchNormalization(),
        Counting(name="counting"),
        frozen,
        keras.layers.SpectralNormalization(keras.layers.Dense(3)),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    optimizer = optimizer or kmp.scaled("sgd", learning_rate=RATE)
    model.compile(optimizer, "mse", metrics=["mae"], **compile_arguments)
    return model


def scaled_sgd():
    """At this scale the gradient of targets of 1e10 overflows, although their loss is finite."""
    return kmp.scaled("sgd", 2.0**100, learning_rate=RATE)


def batches(cause, step, poisoned=True):
    """12 batches of 4, one of which is skipped by its loss or by its gradient; or left out."""
    x, y = data(poisoned=[step] if cause == "forward" else [])
    rows = slice(4 * step, 4 * step + 4)
    if cause == "backward":
        y[rows] = 1e10
    return (x, y) if poisoned else tuple(np.delete(a, rows, axis=0) for a in (x, y))


CAUSES = ["forward", "backward"]


def state(model):
    """Weights, statistics, seeds, and what the inner optimizer has: not what kmp has counted."""
    values = [*model.variables, *model.optimizer.inner_optimizer.variables]
    return {f"{i} {v.name}": np.array(ops.convert_to_numpy(v)) for i, v in enumerate(values)}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def is_keras_own(model):
    """Whether nothing of kmp's is in the place of what Keras put there."""
    tracker = type(loss_tracker(model)) is keras.metrics.Mean
    return tracker and not {"train_step", "make_train_function"} & vars(model).keys()


def trained(x, y, spe, jit):
    """The state, the history and the number of skipped steps after two epochs."""
    keras.utils.set_random_seed(1)
    model = stateful_model(scaled_sgd(), steps_per_execution=spe, jit_compile=jit)
    with kmp.protect(model):
        run = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return state(model), run.history, int(model.optimizer.skipped_steps)


@functools.cache
def trained_without_the_batch(step, spe, jit):
    """Whichever way the batch would go wrong, it is not there."""
    for one, other in zip(*(batches(cause, step, poisoned=False) for cause in CAUSES), strict=True):
        np.testing.assert_array_equal(one, other)
    return trained(*batches(CAUSES[0], step, poisoned=False), spe, jit)


@pytest.mark.parametrize("jit", JIT)
@pytest.mark.parametrize("spe", SPE)
@pytest.mark.parametrize("cause", CAUSES)
def test_a_skipped_step_leaves_nothing_behind(spe, jit, cause):
    """Bit for bit the run without the batch: weights, slots, statistics, counters.

    The averages of an epoch leave it out only if its loss is not finite.
    """
    end, history, skipped = trained(*batches(cause, 5), spe, jit)
    expected_end, expected_history, expected_skipped = trained_without_the_batch(5, spe, jit)
    assert (skipped, expected_skipped) == (2, 0)
    assert_same(end, expected_end)
    assert (history == expected_history) == (cause == "forward")
    assert np.isfinite([*history.values()]).all()
    assert [v for k, v in end.items() if "calls" in k] == [22, 22]


WATCHERS = {
    "protect": lambda: [],
    "GradientHealth": lambda: [GradientHealth(update_freq=3)],
    "TerminateOnNaN": lambda: [TerminateOnNaN(update_freq=2)],
    "all": lambda: [GradientHealth(), TerminateOnNaN(), kmp.callbacks.DivergenceGuard()],
}


def stateful_rnn(kind):
    if kind == "ConvLSTM1D":
        return keras.layers.ConvLSTM1D(4, 3, stateful=True)
    if kind == "Bidirectional":
        return keras.layers.Bidirectional(stateful_rnn("GRU"))
    return getattr(keras.layers, kind)(4, stateful=True, unroll=True)


class Target(keras.Model):
    """Its loss moves the weights of a frozen layer after those of another, as of a target network.

    `branches` says whether it does so within a branch.
    """

    branches = False

    def __init__(self):
        super().__init__()
        self.online, self.head = keras.layers.Dense(4), keras.layers.Dense(1)
        self.target = keras.layers.Dense(4, trainable=False)
        self.backbone = keras.layers.Dense(2, trainable=False)

    def build(self, shape):
        for each in (self.online, self.target, self.backbone):
            each.build(shape)
        self.head.build((None, 4))

    def call(self, x):
        return self.head(self.online(x)) + ops.mean(self.backbone(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        def follow():
            for old, new in zip(self.target.weights, self.online.weights, strict=True):
                old.assign(0.5 * old + 0.5 * ops.stop_gradient(new) + ops.mean(x))
            return True

        if self.branches:
            ops.cond(ops.sum(x) < 1e30, follow, follow)
        else:
            follow()
        return ops.mean(ops.square(y_pred - y))


HOW = [{}, {"run_eagerly": True}, *({"jit_compile": jit} for jit in JIT[1:])]
HOW += [{"steps_per_execution": spe} for spe in SPE[1:]]


@pytest.mark.quick
@pytest.mark.parametrize("branches", [False, True] if BACKEND == "tensorflow" else [False])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_frozen_weights_that_a_step_moves_are_those_before_the_skipped_step(how, branches):
    """As without the bad batch; nothing stays on the variables, and other frozen ones are left."""
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    bad = np.insert(x, 16, np.full((8, 3), np.nan, "float32"), axis=0)
    found = []
    for data_ in (x, bad):
        keras.utils.set_random_seed(0)
        model = Target()
        model.build((None, 3))
        model.branches = branches
        model.compile(kmp.scaled("sgd", learning_rate=0.1), None, **how)
        before = ops.convert_to_numpy(model.backbone.kernel)
        y, watch = data_[:, :1], TerminateOnNaN()
        model.fit(data_, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[watch])
        np.testing.assert_array_equal(ops.convert_to_numpy(model.backbone.kernel), before)
        assert not any("assign" in vars(v) for v in model.variables)
        found.append([ops.convert_to_numpy(v) for v in model.weights])
    assert int(ops.convert_to_numpy(model.optimizer.skipped_steps)) == 2
    for clean, with_bad in zip(*found, strict=True):
        np.testing.assert_array_equal(clean, with_bad)


class Follows(keras.layers.Dense):
    """Moves its own weights, which are frozen, each time it is called."""

    def call(self, x):
        self.kernel.assign(0.5 * self.kernel + ops.mean(x))
        return super().call(x)


@pytest.mark.quick
def test_frozen_weights_that_a_half_layer_moves_are_not_rounded():
    """In the call of such a layer a variable reads in half precision."""
    x = np.full((8, 3), np.nan, "float32")
    keras.config.set_dtype_policy("mixed_float16")
    frozen = Follows(3, kernel_initializer=keras.initializers.Constant(1 / 3), trainable=False)
    model = keras.Sequential([keras.Input((3,)), frozen, keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", learning_rate=0.1), "mse")
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[TerminateOnNaN()])
    assert int(ops.convert_to_numpy(model.optimizer.skipped_steps)) == 1
    assert (ops.convert_to_numpy(frozen.kernel) == np.float32(1 / 3)).all()


@pytest.mark.parametrize("kind", ["SimpleRNN", "GRU", "LSTM", "ConvLSTM1D", "Bidirectional"])
def test_the_states_of_a_stateful_rnn_are_those_before_the_skipped_step(kind):
    """They are in no list of variables, and the next batch begins with them."""
    x = np.random.default_rng(0).normal(size=(12, 5, 6, 3)[: 4 if "Conv" in kind else 3])
    results = []
    for data_ in (x, np.concatenate([x[:8], np.full_like(x[:4], np.inf), x[8:]])):
        keras.utils.set_random_seed(0)
        rnn = stateful_rnn(kind)
        layers = [keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input(batch_shape=(4, *x.shape[1:])), rnn, *layers])
        if BACKEND == "torch" and kind in ("GRU", "LSTM", "Bidirectional"):
            model.compile("sgd", "mse")
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # Keras's
                model.fit(data_, np.ones((len(data_), 1)), batch_size=4, verbose=0)
            return
        model.compile(scaled_sgd(), "mse")
        with kmp.protect(model):
            model.fit(data_, np.ones((len(data_), 1)), batch_size=4, shuffle=False, verbose=0)
        results.append(
            [ops.convert_to_numpy(v) for v in (model.optimizer.skipped_steps, *rnn.states)]
        )
    assert [skipped for skipped, *_ in results] == [0, 1]
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.any(other) or BACKEND == "jax"  # where Keras's trainer does not carry the states


def test_who_watches_changes_nothing():
    ends, histories = {}, {}
    for name, watchers in WATCHERS.items():
        keras.utils.set_random_seed(1)
        model = stateful_model()
        with kmp.protect(model) if name == "protect" else contextlib.nullcontext():
            histories[name] = fit(model, watchers(), poisoned=[2, 5], epochs=2)
        ends[name] = state(model)
        assert is_keras_own(model)
    for name in WATCHERS:
        assert_same(ends["protect"], ends[name])
        for key, value in histories["protect"].items():
            assert histories[name][key] == value and np.isfinite(value).all()


@pytest.mark.quick
@pytest.mark.only("tensorflow", "jax")  # on PyTorch Keras draws from its global generator
def test_dropout_draws_anew_after_a_skipped_step():
    """A batch whose mask makes it overflow would otherwise overflow for ever."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(scaled_sgd(), "mse")
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    x, y = batches("backward", 0)
    with kmp.protect(model):
        model.fit(x[:4], y[:4], verbose=0)
    after = state(model)
    (moved,) = (k for k, v in before.items() if (v != after[k]).any())
    assert "seed" in moved


class Raise(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise OSError("the disk is full")


class EndsEarly(Exception):
    pass


def failing_batches():
    for x, y in zip(*(np.split(a, 12) for a in data()), strict=True):
        yield x, y
        if failing_batches.after == 0:
            raise EndsEarly
        failing_batches.after -= 1


@pytest.mark.quick
def test_a_step_that_raises_ends_the_protection():
    model, watch = stateful_model(), GradientHealth()
    fit(model, [watch])
    failing_batches.after = 4
    before = int(model.optimizer.steps)
    with pytest.raises(Exception) as raised:
        model.fit(failing_batches(), shuffle=False, verbose=0, callbacks=[watch, TerminateOnNaN()])
    assert "EndsEarly" in f"{raised.type} {raised.value}"
    # On PyTorch Keras draws the data outside of the train function: the next `fit` ends the claims.
    if BACKEND != "torch":
        assert is_keras_own(model) and not model.optimizer.measures_details
    assert int(model.optimizer.steps) > before
    assert np.isfinite(fit(model, [watch], poisoned=[2])["loss"]).all()
    assert is_keras_own(model) and not model.optimizer.measures_details


@pytest.mark.only("jax")
def test_a_step_that_raises_in_one_of_several_processes_assigns_nothing(monkeypatch):
    """To assign, JAX would wait for the others. The next `fit` ends the protection."""
    model, watch, assigned = stateful_model(), GradientHealth(), []
    fit(model, [watch])
    failing_batches.after = 4
    monkeypatch.setattr(type(backend), "assigns_together", lambda *_: True)
    monkeypatch.setattr(type(backend), "settle", lambda *_: assigned.append("state"))
    with pytest.raises(EndsEarly):
        model.fit(failing_batches(), shuffle=False, verbose=0, callbacks=[watch])
    assert not assigned and model.optimizer.measures_details
    assert np.isfinite(fit(model, [watch], poisoned=[2])["loss"]).all()
    assert is_keras_own(model) and not model.optimizer.measures_details


def test_what_another_callbacks_error_leaves_ends_with_the_next_fit():
    model = stateful_model()
    with pytest.raises(OSError):
        fit(model, [GradientHealth(), Raise()])
    history = fit(model, [], poisoned=[2])
    assert np.isnan(history["loss"]).all() and is_keras_own(model)
    assert not model.optimizer.measures_details


def test_a_watched_fit_puts_back_how_often_it_measures():
    model = linear_model()
    model.optimizer.build(model.trainable_variables)
    sampling = model.optimizer.telemetry.sampling
    model.optimizer.sample_gradients(7, details=False)
    fit(model, [GradientHealth(update_freq=3)])
    assert not model.optimizer.measures_details
    assert ops.convert_to_numpy(sampling)[:2].tolist() == [7, 0]


def test_a_checkpoint_of_a_watched_fit_does_not_settle_how_often_it_measures(tmp_path):
    """It is saved while the callback's interval holds, as by ModelCheckpoint or OrbaxCheckpoint."""
    model, path = linear_model(), tmp_path / "model.weights.h5"
    save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    fit(model, [GradientHealth(update_freq=3), save])
    resumed = linear_model()
    resumed.optimizer.build(resumed.trainable_variables)
    resumed.load_weights(path)
    fit(resumed, [GradientHealth(update_freq=3)])
    assert ops.convert_to_numpy(resumed.optimizer.telemetry.sampling)[:2].tolist() == [0, 0]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("order", [(3, 50), (50, 3)], ids=str)
def test_two_who_watch_one_optimizer_measure_as_often_as_either_asks(order, raises):
    model, measured = linear_model(), []
    watches = [GradientHealth(update_freq=freq) for freq in order]
    steps = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: measured.append(model.optimizer.telemetry.sampling.numpy()[0])
    )
    with pytest.raises(OSError) if raises else contextlib.nullcontext():
        fit(model, [*watches, steps, *[Raise()] * raises])
    assert measured == [-3]  # negative, as it is lent
    fit(model, [])
    assert not model.optimizer.measures_details
    assert ops.convert_to_numpy(model.optimizer.telemetry.sampling)[:2].tolist() == [0, 0]


@pytest.mark.only("tensorflow", "jax")  # torch traces nothing
@pytest.mark.parametrize("jit", [x for x in (False, True) if x or BACKEND == "tensorflow"])
def test_a_second_fit_traces_nothing_again(jit):
    model = stateful_model(jit_compile=jit)
    kinds = [lambda: [], lambda: [GradientHealth()], lambda: [TerminateOnNaN()]]
    traces = []
    for _ in range(3):
        for callbacks in kinds:
            fit(model, callbacks(), epochs=1, validation_data=data())
        traces.append(Counting.traces)
    assert traces[0] < traces[1] or traces[0] > 0
    assert traces[1] == traces[2]
    assert traces[0] == traces[1]


def test_what_was_compiled_is_forgotten_with_the_models_own():
    """A cast in between: the protected function would go on with the old dtypes."""
    model = linear_model(kmp.scaled("sgd", learning_rate=0.0))
    fit(model, [TerminateOnNaN()])
    model.layers[-1].kernel.trainable = True
    before = Counting.traces
    model.add(Counting())
    model.train_function = None
    fit(model, [TerminateOnNaN()])
    assert Counting.traces > before


def test_evaluation_is_the_same_before_and_after():
    model = linear_model(metrics=["mae"])
    x, y = data()
    fit(model, [TerminateOnNaN()], validation_data=(x, y))
    expected = model.evaluate(x, y, batch_size=4, verbose=0)
    history = fit(linear_model(metrics=["mae"]), [TerminateOnNaN()], validation_data=(x, y))
    assert [history["val_loss"][0], history["val_mae"][0]] == expected
    for _ in range(2):
        model.optimizer.learning_rate = 0.0
        history = fit(model, [TerminateOnNaN()], validation_data=(x, y))
        assert history["val_loss"] == [expected[0]]
        assert model.evaluate(x, y, batch_size=4, verbose=0) == expected


def test_the_last_epochs_loss_stays_readable():
    model = linear_model()
    history = fit(model, [TerminateOnNaN()])
    assert float(model.get_metrics_result()["loss"]) == history["loss"][-1]


def test_evaluate_with_a_callback_of_fit_protects_nothing():
    model = linear_model()
    x, y = data()
    model.evaluate(x, y, verbose=0, callbacks=[TerminateOnNaN(), GradientHealth()])
    assert is_keras_own(model)


@pytest.mark.quick
def test_a_handle_can_be_removed_twice_and_a_second_changes_nothing():
    model = linear_model()
    one, two = kmp.protect(model), kmp.protect(model)
    fit(model, [GradientHealth()])
    assert not is_keras_own(model)  # what the user has asked for outlives `fit`
    with kmp.protect(model):
        pass
    assert np.isfinite(fit(model, [], poisoned=[3])["loss"]).all()
    two.remove()
    one.remove()
    two.remove()
    assert is_keras_own(model)
    assert np.isnan(fit(model, [], poisoned=[3])["loss"]).all()


def test_a_with_block_ends_it_also_when_it_raises():
    model = linear_model()
    with pytest.raises(KeyError), kmp.protect(model):
        fit(model, [])
        raise KeyError
    assert is_keras_own(model)


def test_compile_in_between_keeps_the_protection():
    x, y = np.ones((4, 2), "float32"), np.full((4, 1), 5, "float32")
    model, losses = linear_model(kmp.scaled("sgd", learning_rate=0.0)), []
    kmp.protect(model)
    for loss in ("mse", "mae"):
        model.compile(kmp.scaled("sgd", learning_rate=0.0), loss=loss)
        losses += model.fit(x, y, verbose=0).history["loss"]
        assert np.isfinite(fit(model, [], poisoned=[3])["loss"]).all()
    assert losses == [25.0, 5.0]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "in fit"])
def test_a_copy_is_a_model_of_keras_own(how):
    """Copies go through Keras's files: neither protected, nor broken, nor tied to the original."""
    model, copies = linear_model(), []
    make = {"deepcopy": copy.deepcopy}.get(how, lambda x: pickle.loads(pickle.dumps(x)))
    kmp.protect(model)
    also = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: copies.append(make(model)))
    fit(model, [GradientHealth(), also] if how == "in fit" else [])
    (made,) = copies or [make(model)]
    assert is_keras_own(made) and not np.isfinite(fit(made, [], poisoned=[2])["loss"]).any()
    kmp.protect(made)
    assert np.isfinite(fit(made, [], poisoned=[2])["loss"]).all()
    assert np.isfinite(fit(model, [], poisoned=[2])["loss"]).all()


class Parts(keras.Model):
    """Whose class has no `build`, and a layer that nothing calls if it is told to have one."""

    def __init__(self, first, unused=False):
        super().__init__()
        self.first, self.last = first, keras.layers.Dense(1)
        self.unused = keras.layers.Dense(1) if unused else None

    def call(self, x):
        return self.last(self.first(x))


@pytest.mark.filterwarnings("ignore:.build.* was called", "ignore:Gradients do not exist")
@pytest.mark.parametrize("kind", ["by build", "with a built part", "with an unused layer"])
def test_models_that_are_marked_as_built_before_their_layers_are(kind):
    first = keras.Sequential([keras.layers.Dense(3)])
    if kind != "by build":
        first.build((None, 2))
    model = Parts(first, unused="unused" in kind)
    model(data()[0][:4]) if "unused" in kind else model.build((None, 2))
    assert model.built
    model.compile(kmp.scaled("sgd", learning_rate=RATE), "mse")
    history = fit(model, [GradientHealth()], poisoned=[0, 2])
    assert history["skipped_steps"] == [2] and np.isfinite(history["loss"]).all()
    assert int(model.optimizer.iterations) == 10 and len(model.optimizer.variable_paths) == 4


@pytest.mark.quick
def test_train_on_batch_is_protected_too():
    model = stateful_model()
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    x, y = data(steps=1, poisoned=[0])
    with kmp.protect(model):
        model.train_on_batch(x, y)
    assert int(model.optimizer.skipped_steps) == 1
    assert_same(before, state(model))


def test_callbacks_that_a_loop_around_train_on_batch_drives():
    """The callbacks see every step, and their protection lasts until `on_train_end`."""
    model, health = linear_model(), GradientHealth()
    history = keras.callbacks.History()
    mine = [health, TerminateOnNaN(), kmp.callbacks.DivergenceGuard(), history]
    callbacks = keras.callbacks.CallbackList(mine, model=model)
    x, y = data(steps=4, poisoned=[2])
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for step in range(4):
        callbacks.on_train_batch_begin(step)
        part = slice(4 * step, 4 * step + 4)
        logs = model.train_on_batch(x[part], y[part], return_dict=True)
        callbacks.on_train_batch_end(step, logs)
    callbacks.on_epoch_end(0, logs)
    assert np.isfinite(logs["loss"]) and history.history["skipped_steps"] == [1]
    assert health.report.step == 4
    callbacks.on_train_end()
    assert is_keras_own(model)


def test_an_own_train_step_set_on_the_model_is_put_back():
    model = linear_model()
    steps = []
    keras_own = model.train_step

    def step(*args):
        steps.append(args)
        return keras_own(*args)

    model.train_step = step
    fit(model, [TerminateOnNaN()])
    assert steps and model.train_step is step


@pytest.mark.parametrize("scale", [2.0**100, np.inf])  # half of which is no other number
def test_keras_own_loss_scaling_is_protected_too(scale):
    sgd = keras.optimizers.SGD(RATE)
    model = stateful_model(keras.optimizers.LossScaleOptimizer(sgd, initial_scale=scale))
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    x, y = batches("backward", 0)
    with kmp.protect(model):
        run = model.fit(x[:4], y[:4], verbose=0)
    assert np.isfinite(run.history["loss"]).all()
    assert_same(before, state(model))


class StepsAnother(keras.Model):
    """As a GAN: what `compile` makes for its own optimizer never steps.

    Its layers are in float32: a watched step sums half precision otherwise than Keras.
    """

    def __init__(self):
        super().__init__()
        layers = keras.layers.BatchNormalization, functools.partial(keras.layers.Dense, 1)
        self.parts = keras.Sequential([layer(dtype="float32") for layer in layers])
        self.parts.build((None, 2))
        self.other = kmp.scaled("sgd", learning_rate=RATE)
        self.other.build(self.parts.trainable_variables)

    def call(self, x, training=False):
        return self.parts(x, training=training)

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                scaled = self.other.scale_loss(loss)
            self.other.apply(tape.gradient(scaled, weights), weights)
        else:
            self.zero_grad()
            loss = self.compute_loss(x, y, self(x, training=True))
            self.other.scale_loss(loss).backward()
            self.other.apply([v.value.grad for v in weights], weights)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


@pytest.mark.only("tensorflow", "torch")  # JAX's train step is another
def test_an_optimizer_that_does_not_step_skips_nothing():
    keras.config.set_dtype_policy("mixed_float16")
    found = []
    for watches in ([], [TerminateOnNaN()]):
        keras.utils.set_random_seed(0)
        model = StepsAnother()
        model.compile(loss="mse")
        assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
        found.append((fit(model, watches)["loss"], model.get_weights()))
    (loss, weights), (watched_loss, watched_weights) = found
    np.testing.assert_allclose(watched_loss, loss, rtol=1e-6)
    for one, other in zip(watched_weights, weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loss_that_is_not_finite_but_applied_is_reported():
    """Targets of 1e19: their mean square leaves float32, its gradient does not."""
    model = linear_model(kmp.scaled("sgd", 1.0, learning_rate=1e-19))
    x, y = data()
    y[20:24] = 1e20
    with kmp.protect(model):
        run = model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert int(model.optimizer.skipped_steps) == 0
    assert np.isinf(run.history["loss"]).all()


def test_logs_of_each_batch_are_of_the_steps_that_counted():
    """Keras's TerminateOnNaN looks at them."""

    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append([logs["loss"], logs["mae"]])

    seen, model = [], linear_model(metrics=["mae"])
    with kmp.protect(model):
        fit(model, [Logs()], poisoned=[0, 5])
    assert np.isnan(seen[0][0]) or seen[0][0] == 0
    assert np.isfinite(seen[1:]).all() and seen[5] == seen[4]


@pytest.mark.quick
@pytest.mark.parametrize("model", [None, keras.layers.Dense(1)])
def test_only_models_can_be_protected(model):
    with pytest.raises(TypeError, match=r"`model` of protect must be a keras.Model"):
        kmp.protect(model)


@pytest.mark.parametrize(
    "optimizer, message", [("sgd", "Received: a model compiled with SGD"), (None, "be compiled")]
)
def test_only_an_optimizer_that_skips_needs_it(optimizer, message):
    model = keras.Sequential([keras.layers.Dense(1)])
    if optimizer:
        model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=message):
        kmp.protect(model)


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("cause", CAUSES)
def test_under_a_strategy_too(cause):
    """One step per execution: with more Keras's own loop raises here, without kmp too."""
    import replicas

    histories, ends = [], []
    for poisoned in (True, False):
        keras.utils.set_random_seed(1)
        with replicas.mirrored(2).scope():
            model = keras.Sequential(
                [
                    keras.Input((2,)),
                    keras.layers.BatchNormalization(),
                    Counting(),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(scaled_sgd(), "mse", metrics=["mae"])
        x, y = batches(cause, 5, poisoned)
        with kmp.protect(model):
            run = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        histories.append(run.history)
        ends.append(state(model))
    assert_same(*ends)
    # What is finite of the skipped batch counts, such as the losses of the other replica.
    assert np.isfinite([*histories[0].values()]).all()
    assert histories[0] != histories[1]

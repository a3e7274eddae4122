"""Making the optimizer: what `scaled` takes and refuses, what is forwarded, what is configured."""

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import ops
from oracle import MODES, Run, number

import kmp
from kmp.scaling import rules as scaling

k = keras.optimizers


@pytest.mark.parametrize(
    "given",
    [
        (k.Adam, {"learning_rate": 0.5, "beta_1": 0.25}),
        (k.Adam(0.5, beta_1=0.25), {}),
        ("adam", {"learning_rate": 0.5, "beta_1": 0.25}),
        (k.serialize(k.Adam(0.5, beta_1=0.25)), {}),
        ({"class_name": "adam", "config": {"learning_rate": 0.5, "beta_1": 0.25}}, {}),
    ],
    ids=["class", "instance", "name", "serialized", "dict"],
)
def test_scaled_takes_what_keras_takes(given):
    optimizer, arguments = given
    result = kmp.scaled(optimizer, **arguments)
    assert isinstance(result, kmp.LossScaleOptimizer)
    assert type(result.inner_optimizer).__name__ == "Adam"
    assert float(number(result.learning_rate)) == 0.5
    assert result.inner_optimizer.beta_1 == 0.25
    assert result.loss_scale == kmp.DynamicLossScale()


@keras.saving.register_keras_serializable(package="a_program")
class Momentum(k.Optimizer):
    """As programs write their own: slots by hand, and a correction by `iterations`."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.means = [self.add_variable_from_reference(v, "mean") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        mean = self.means[self._get_variable_index(variable)]
        self.assign(mean, 0.5 * mean + 0.5 * gradient)
        share = 1 - ops.power(0.5, ops.cast(self.iterations + 1, variable.dtype))
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * mean / share)


@pytest.mark.parametrize("module", ["a_library", "__main__"])  # of the latter Keras saves no name
def test_an_optimizer_that_a_program_has_registered(module, tmp_path, monkeypatch):
    monkeypatch.setattr(Momentum, "__module__", module)

    def trained(optimizer):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        model.fit(np.eye(2, dtype="float32"), np.ones((2, 1)), epochs=3, verbose=0)
        return model

    model, plain = trained(kmp.scaled(Momentum(0.1))), trained(Momentum(0.1))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again.optimizer.inner_optimizer) is Momentum
    unbuilt = pickle.loads(pickle.dumps(kmp.scaled(Momentum(0.1))))
    assert type(unbuilt.inner_optimizer) is Momentum
    for found in (model, again):
        for one, other in zip(found.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
    pairs = zip(model.optimizer.variables, again.optimizer.variables, strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(ops.convert_to_numpy(one), ops.convert_to_numpy(other))


def test_scaled_wraps_the_very_instance():
    """A subclass of Adam would lose PyTorch's fused update: it is chosen by the exact class."""
    inner = k.Adam()
    assert kmp.scaled(inner).inner_optimizer is inner


@pytest.mark.only("torch")
def test_a_class_keeps_pytorchs_fused_update():
    assert type(kmp.scaled(k.Adam).inner_optimizer) is type(k.Adam())


@pytest.mark.parametrize(
    "loss_scale, expected",
    [
        ("dynamic", kmp.DynamicLossScale()),
        ("none", kmp.NoOpLossScale()),
        (512, kmp.StaticLossScale(512)),
        (kmp.DynamicLossScale(64), kmp.DynamicLossScale(64)),
    ],
    ids=str,
)
def test_loss_scale(loss_scale, expected):
    optimizer = kmp.scaled("sgd", loss_scale)
    optimizer.build([keras.Variable(1.0)])
    assert optimizer.loss_scale == expected
    assert number(optimizer.dynamic_scale) == number(expected.init().scale)


class SelfScaling(k.SGD):
    def scale_loss(self, loss):
        return loss * 1024


NESTED = "must not scale the loss itself"


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: kmp.scaled(kmp.scaled("sgd")), rf"{NESTED}.*Pass its `inner_optimizer`"),
        (lambda: kmp.scaled(k.LossScaleOptimizer(k.SGD())), rf"{NESTED}.*: LossScaleOptimizer"),
        (lambda: kmp.LossScaleOptimizer(kmp.scaled("sgd")), NESTED),
        (lambda: kmp.scaled(SelfScaling()), rf"{NESTED}.*SelfScaling.*overrides `scale_loss`"),
        (lambda: kmp.scaled(k.SGD(loss_scale_factor=8.0)), r"kmp.scaled\(SGD, loss_scale=8.0"),
        (lambda: kmp.scaled("sgd", loss_scale_factor=8.0), rf"{NESTED}.*loss_scale_factor=8.0"),
        (lambda: kmp.scaled(k.SGD(), learning_rate=0.1), r"\['learning_rate'\].*Write kmp.scaled"),
        (lambda: kmp.scaled("sgd", "dinamic"), 'must be "dynamic", "none"'),
        (lambda: kmp.scaled("sgd", -1), "positive, finite number"),
        (lambda: kmp.LossScaleOptimizer(k.SGD), r"instance.*Write kmp.scaled\(SGD, ...\)"),
        (lambda: kmp.LossScaleOptimizer(k.SGD(), initial_scale=0), "`initial_scale` .* positive"),
        (lambda: kmp.LossScaleOptimizer(k.SGD(), -4), "`initial_scale` .* positive"),
        (lambda: kmp.LossScaleOptimizer(k.SGD(), float("nan")), "`initial_scale` .* positive"),
        (lambda: kmp.LossScaleOptimizer(k.SGD(), 8, 0), "whole number of steps, at least 1"),
        (lambda: kmp.LossScaleOptimizer(k.SGD(), 8, -1), "whole number of steps, at least 1"),
        (lambda: kmp.LossScaleOptimizer(k.SGD(), 8, loss_scale=8), "Pass either `loss_scale` or"),
        (lambda: kmp.LossScaleOptimizer(k.SGD(), clipnorm=1.0), "clipnorm` on the `inner_optim"),
        (lambda: kmp.LossScaleOptimizer(k.SGD(), dynamic=False), "dynamic=False.*loss_scale=1024"),
        (lambda: kmp.LossScaleOptimizer(k.SGD(), loss_scale_factor=8.0), "or write loss_scale"),
        (lambda: kmp.LossScaleOptimizer(k.SGD(), wrong=1.0), "wrong"),
        (
            lambda: kmp.scaled("no_such_optimizer"),
            "'no_such_optimizer', a name .* Write for example",
        ),
        (lambda: kmp.scaled("sgd", wrong=1), "wrong"),
        (lambda: kmp.scaled(None), "Received: None. Write for example kmp.scaled"),
        (lambda: kmp.scaled("sgd", None), "`loss_scale` must be .*Received: loss_scale=None"),
    ],
)
def test_bad_input_is_told_what_to_write(build, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build()


def test_what_scripts_for_keras_2_call_is_told_its_present_name():
    optimizer = kmp.LossScaleOptimizer(k.SGD(0.5), loss_scale=8.0)
    with pytest.raises(AttributeError, match=r"no `get_scaled_loss`.*optimizer.scale_loss\(loss\)"):
        optimizer.get_scaled_loss(ops.ones(()))
    with pytest.raises(
        AttributeError, match=r"Leave it out: optimizer.apply\(gradients, variables"
    ):
        optimizer.get_unscaled_gradients([ops.ones(())])
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        optimizer.no_such_name  # noqa: B018
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    gradient = optimizer.scale_loss(ops.ones(())) * ops.ones(1)  # of the loss `weight`
    optimizer.apply([gradient], [weight])
    assert number(weight[0]) == 0.5


@pytest.mark.parametrize("initial_scale", [0.25, 2.0**30])
def test_kerass_initial_scale_knows_no_bounds(initial_scale):
    optimizer = kmp.LossScaleOptimizer(k.SGD(), initial_scale=initial_scale)
    optimizer.build([keras.Variable(1.0)])
    assert number(optimizer.dynamic_scale) == initial_scale
    assert optimizer.initial_scale == initial_scale


def test_kerass_arguments_are_shorthands():
    optimizer = kmp.LossScaleOptimizer(k.SGD(), 128, 7, "mine")
    assert optimizer.loss_scale == kmp.DynamicLossScale(128, growth_interval=7)
    assert optimizer.dynamic_growth_steps == 7
    assert optimizer.name == "mine"


SETTINGS = {
    "weight_decay": 0.5,
    "clipnorm": 1.0,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 3,
    "gradient_accumulation_steps": 4,
}


@pytest.mark.parametrize("built", [False, True], ids=["new", "built"])
@pytest.mark.parametrize("name", [*SETTINGS, "global_clipnorm", "clipvalue"])
def test_settings_are_those_of_the_inner_optimizer(name, built):
    others = {} if name in SETTINGS else {name: 0.5}
    inner = k.Adam(**(others or SETTINGS))
    optimizer = kmp.LossScaleOptimizer(inner)
    if built:
        optimizer.build([keras.Variable(np.ones(2))])
    expected = (others or SETTINGS)[name]
    assert getattr(optimizer, name) == expected
    assert getattr(inner, name) == expected


@pytest.mark.parametrize(
    "name", ["weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "ema_momentum"]
)
def test_settings_are_set_on_the_inner_optimizer(name):
    optimizer = kmp.scaled("sgd")
    setattr(optimizer, name, 0.125)
    assert getattr(optimizer.inner_optimizer, name) == 0.125
    assert getattr(optimizer, name) == 0.125


def test_setting_clipnorm_clips():
    variable = keras.Variable(np.float32([1, 1]))
    run = Run(kmp.scaled("sgd", 8, learning_rate=1.0), "eager", [variable])
    run.optimizer.clipnorm = 1.0
    run.step([[3.0, 4.0]])
    # 1 - 3/5 and 1 - 4/5, in three roundings.
    np.testing.assert_allclose(ops.convert_to_numpy(variable), [0.4, 0.2], rtol=1e-6)


def test_an_unknown_attribute_is_one():
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = kmp.scaled("sgd").no_such_thing
    assert not hasattr(kmp.scaled("sgd"), "__no_such_protocol__")


@pytest.mark.parametrize("by", ["var_names", "var_list"])
def test_exclude_from_weight_decay_really_excludes(by):
    kernel = keras.Variable(np.float32([1, 2]), name="kernel")
    scale = keras.Variable(np.float32([1, 2]), name="gamma")
    optimizer = kmp.scaled(k.AdamW, 8, learning_rate=1.0, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(**{by: ["gamma"] if by == "var_names" else [scale]})
    run = Run(optimizer, "eager", [kernel, scale])
    run.step([np.zeros(2), np.zeros(2)])
    np.testing.assert_array_equal(ops.convert_to_numpy(kernel), [0.5, 1])
    np.testing.assert_array_equal(ops.convert_to_numpy(scale), [1, 2])


def test_learning_rate_is_the_inner_optimizers():
    optimizer = kmp.scaled("sgd", learning_rate=0.5)
    optimizer.learning_rate = 0.25
    assert number(optimizer.inner_optimizer.learning_rate) == 0.25
    optimizer.inner_optimizer.learning_rate = 0.125
    assert number(optimizer.learning_rate) == 0.125


def test_kerass_callbacks_reach_the_inner_learning_rate():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", learning_rate=0.0), "mse")
    model.optimizer.learning_rate = 1.0
    callback = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model.fit(np.zeros((2, 1)), np.zeros((2, 1)), epochs=2, verbose=0, callbacks=[callback])
    assert number(model.optimizer.inner_optimizer.learning_rate) == 0.25


OPTIMIZERS = {
    "dynamic": lambda: kmp.scaled(k.Adam, learning_rate=0.25, clipnorm=0.5),
    "static": lambda: kmp.scaled(k.SGD, 64, momentum=0.5),
    "none": lambda: kmp.scaled(k.SGD, "none"),
    "keras": lambda: kmp.LossScaleOptimizer(k.SGD(), 128, 7, name="mine"),
    "unmeasured": lambda: kmp.LossScaleOptimizer(
        k.SGD(k.schedules.ExponentialDecay(0.5, 1, 0.5)),
        loss_scale=kmp.DynamicLossScale(64, hysteresis=3),
        measure_gradients=False,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_config_round_trip(name):
    optimizer = OPTIMIZERS[name]()
    config = optimizer.get_config()
    untouched = copy.deepcopy(config)
    for _ in range(2):  # Keras's pops from the caller's dict, and fails the second time
        again = kmp.LossScaleOptimizer.from_config(config)
        assert config == untouched
        assert again.get_config() == config
        assert again.loss_scale == optimizer.loss_scale
        assert again.inner_optimizer is not optimizer.inner_optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_serialisation_through_keras(name):
    optimizer = OPTIMIZERS[name]()
    again = k.deserialize(k.serialize(optimizer))
    assert type(again) is kmp.LossScaleOptimizer
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_with_it_can_be_cloned(name):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(OPTIMIZERS[name](), "mse")
    clone = keras.models.clone_model(model)
    clone.compile_from_config(model.get_compile_config())
    assert clone.optimizer.get_config() == model.optimizer.get_config()
    clone.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert number(clone.optimizer.steps) == 1


@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "mixed_bfloat16", "float32"])
def test_compile_does_not_wrap_it_again(policy):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = kmp.scaled("sgd")
    model.compile(optimizer, "mse")
    assert model.optimizer is optimizer
    assert not isinstance(optimizer.inner_optimizer, k.LossScaleOptimizer)


def test_compiling_again_with_the_same_optimizer_keeps_its_state():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = kmp.scaled("sgd", kmp.DynamicLossScale(128, growth_interval=1))
    x, y = np.ones((4, 2)), np.ones((4, 1))
    model.compile(optimizer, "mse")
    model.fit(x, y, verbose=0)
    model.compile(optimizer, "mae")
    assert number(optimizer.dynamic_scale) == 256
    model.fit(x, y, verbose=0)
    assert number(optimizer.dynamic_scale) == 512
    assert number(optimizer.steps) == 2


def test_building_again_changes_nothing():
    optimizer = kmp.scaled("sgd", 8)
    variables = [keras.Variable(1.0)]
    optimizer.build(variables)
    before = optimizer.variables
    optimizer.build(variables)
    assert [id(v) for v in optimizer.variables] == [id(v) for v in before]


class Halving:
    """A user's own strategy: the four methods, and nothing of kmp's."""

    def init(self):
        return kmp.ScaleState(
            ops.convert_to_tensor(64.0, "float32"), ops.zeros((), "int32"), ops.zeros((), "int32")
        )

    def next(self, state, finite):
        return state._replace(scale=state.scale / 2)

    def scale(self, loss, state):
        return loss * state.scale

    def unscale(self, tree, state):
        return [None if g is None else g / state.scale for g in tree]


def test_a_strategy_of_ones_own():
    assert isinstance(Halving(), scaling.LossScale)
    variable = keras.Variable(np.float32([4, 4]))
    run = Run(kmp.scaled("sgd", Halving(), learning_rate=1.0), "eager", [variable])
    for expected in (32, 16, 8):
        run.step([[1.0, 0.5]])
        assert number(run.optimizer.dynamic_scale) == expected
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), [1, 2.5])


@pytest.mark.parametrize("loss", [np.float32(3), np.float16(3), 3.0], ids=["f32", "f16", "python"])
def test_scale_loss_before_and_after_build(loss):
    optimizer = kmp.scaled("sgd", 1024)
    assert number(optimizer.scale_loss(loss)) == 3072
    optimizer.build([keras.Variable(1.0)])
    assert number(optimizer.scale_loss(loss)) == 3072


def test_finalize_reaches_the_inner_optimizer():
    """Where averaged weights are written back at the end of training."""
    variable = keras.Variable(np.float32([1]))
    inner = k.SGD(1.0, use_ema=True, ema_momentum=0.5)
    run = Run(kmp.scaled(inner, loss_scale=8), "eager", [variable])
    run.step([[1.0]])
    average = ops.convert_to_numpy(inner._model_variables_moving_average[0])
    run.optimizer.finalize_variable_values([variable])
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), average)


def test_complex_variables_are_refused():
    variable = keras.Variable(np.ones(2, "complex64"), dtype="complex64", name="phase")
    with pytest.raises(ValueError, match=r"must be real\. Received: 'phase' of dtype complex64"):
        kmp.scaled("sgd").build([variable])


@pytest.mark.parametrize(
    "gradient", [[512, 1024], np.array([512, 1024]), np.array([512, 1024], "float64")], ids=type
)
def test_gradients_of_any_array_are_unscaled(gradient):
    """A list, integers and float64 of NumPy: what they mean is the gradient of the scaled loss."""
    variable = keras.Variable(np.float32([1, 1]))
    optimizer = kmp.scaled("sgd", 1024, learning_rate=1.0)
    optimizer.build([variable])
    optimizer.scale_loss(1.0)
    optimizer.apply([gradient], [variable])
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), [0.5, 0])


def test_a_variable_that_was_frozen_when_the_optimizer_was_built():
    kernel, other = (keras.Variable(np.float32([1, 1]), name=x) for x in ("kernel", "other"))
    optimizer = kmp.scaled("sgd", 1024)
    optimizer.build([kernel])
    optimizer.scale_loss(1.0)
    with pytest.raises(ValueError, match="If it was frozen then, compile the model again"):
        optimizer.apply([np.float32([1, 1])] * 2, [kernel, other])


@pytest.mark.parametrize(
    ("gradient", "of_another_model", "message"),
    [
        (np.float32([1, 1]), True, "variables that the optimizer was built with. Received: 'other"),
        (np.float32(1), False, r"Received: a gradient of shape \(\) for 'kernel' of shape \(2,\)"),
    ],
    ids=["variable", "shape"],
)
def test_what_does_not_belong_together_is_refused(gradient, of_another_model, message):
    kernel, other = (keras.Variable(np.float32([1, 1]), name=x) for x in ("kernel", "other"))
    optimizer = kmp.scaled("sgd", 1024)
    optimizer.build([kernel])
    before = [ops.convert_to_numpy(v) for v in optimizer.variables]
    with pytest.raises(ValueError, match=message):
        optimizer.apply([gradient], [other if of_another_model else kernel])
    for variable, value in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), value)


@pytest.mark.parametrize("mode", MODES)
def test_a_rule_of_a_users_is_given_tensors(mode):
    """It may be written in the backend's own operations, which take no NumPy."""
    given = []

    class Rule(kmp.DynamicLossScale):
        def next(self, state, finite):
            given.extend([*state, finite])
            return super().next(state, finite)

    run = Run(kmp.scaled("sgd", Rule()), mode)
    run.step([np.ones(x.shape, "float32") for x in run.variables])
    assert given and all(map(ops.is_tensor, given))


def test_repr_says_what_it_is():
    plain = repr(kmp.scaled("sgd", 128.0))
    assert plain == "<LossScaleOptimizer of SGD, loss_scale=StaticLossScale(value=128.0)>"
    assert "spikes=SkipSpikes(factor=10.0, " in repr(kmp.scaled("adam", spikes="skip"))


@pytest.mark.only("jax")
def test_a_train_step_that_scales_the_loss_as_on_other_backends_is_told():
    """`fit` has emptied the variables."""

    class Scales(keras.Sequential):
        def train_step(self, state, data):
            return {"loss": self.optimizer.scale_loss(keras.ops.mean(data[0]))}, state

    model = Scales([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(RuntimeError, match=r"stateless_scale_loss\(optimizer_variables, loss\)"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)

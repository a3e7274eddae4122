"""Weights and slots in half precision: the update is float32's, and what is stored is its rounding.

A weight and its remainder hold the exact result of each update, so that with `master_weights` every
optimizer must take bit for bit the way of one whose variables are float32.
"""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops
from older import is_before, muon, of_keras
from oracle import BACKEND, MODES, Run, few, number

import kmp
from kmp.half_memory import updates
from kmp.half_memory.rounding import part_of, random_bits, stochastic_round
from kmp.half_memory.views import MasterView

pytestmark = pytest.mark.gpu

BFLOAT16 = ml_dtypes.bfloat16
SHAPES = {"kernel": (6, 4), "bias": (4,)}
STEPS = 5
OPTIMIZERS = {
    "sgd": lambda **kw: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, **kw),
    "adam": lambda **kw: keras.optimizers.Adam(0.01, amsgrad=True, **kw),
    "adamw": lambda **kw: keras.optimizers.AdamW(0.01, weight_decay=3.0, **kw),
    "adamax": lambda **kw: keras.optimizers.Adamax(0.01, **kw),
    "nadam": lambda **kw: keras.optimizers.Nadam(0.01, **kw),
    "rmsprop": lambda **kw: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True, **kw),
    "adagrad": lambda **kw: keras.optimizers.Adagrad(0.01, **kw),
    "adadelta": lambda **kw: keras.optimizers.Adadelta(0.5, **kw),
    "adafactor": lambda **kw: keras.optimizers.Adafactor(0.01, **kw),
    "ftrl": lambda **kw: keras.optimizers.Ftrl(0.05, **kw),
    "lion": lambda **kw: keras.optimizers.Lion(0.01, weight_decay=0.1, **kw),
    "lamb": lambda **kw: keras.optimizers.Lamb(0.01, **kw),
    "muon": lambda **kw: muon(0.01, **kw),
    "schedule free": lambda **kw: of_keras("optimizers.ScheduleFreeAdamW")(0.01, **kw),
}
FEATURES = {
    "clipnorm": {"clipnorm": 0.5},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.2},
    "weight decay": {"weight_decay": 0.05},
    "average": {"use_ema": True, "ema_momentum": 0.9},
    "overwriting average": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
}


def variables_of(dtype, shapes=SHAPES):
    random = np.random.default_rng(0)
    return [
        keras.Variable(random.normal(size=shape).astype(BFLOAT16), dtype=dtype, name=name)
        for name, shape in shapes.items()
    ]


def gradients_of(step, shapes=SHAPES):
    random = np.random.default_rng(100 + step)
    return [random.normal(size=shape).astype("float32") for shape in shapes.values()]


def run_of(optimizer, dtype, mode="eager", **kwargs):
    loss_scale = kwargs.pop("loss_scale", "none")
    constraint = kwargs.pop("constraint", None)
    scaled = kmp.scaled(optimizer, loss_scale=loss_scale, **kwargs)
    variables = variables_of(dtype)
    for variable in variables:
        variable.constraint = constraint
    return Run(scaled, mode, variables)


def values(variables):
    return [ops.convert_to_numpy(ops.cast(v, "float32")) for v in variables]


def remainders_of(run):
    return [v for v in run.inner.variables if v.name.endswith("_remainder")]


def joined(weights, remainders):
    """float32, in NumPy: the bits of a bfloat16 number, and the integer that is added to them."""
    upper = np.asarray(weights).astype(BFLOAT16).view("uint16").astype("uint32") << 16
    return (upper + np.asarray(remainders).astype("int64")).astype("uint32").view("float32")


def exact(run):
    """The float32 weights that weights and remainders make up."""
    pairs = zip(values(run.variables), remainders_of(run), strict=True)
    return [joined(weight, ops.convert_to_numpy(rest)) for weight, rest in pairs]


def slots_of(run):
    """All that the inner optimizer holds in the shape of a variable, by name."""
    return {
        v.name: v
        for v in run.inner.variables
        if tuple(v.shape) in SHAPES.values() and not v.name.endswith("_remainder")
    }


def assert_way_of_float32(make, mode="eager", begin=0, rtol=0.0, **kwargs):
    """Joined weights and slots are, bit for bit or nearly, those of a float32 run."""

    def assert_equal(a, b, name=""):
        if rtol:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-3 * rtol, err_msg=name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)

    half = run_of(make(), "bfloat16", mode, master_weights=True, slot_dtype="float32", **kwargs)
    full = run_of(make(), "float32", mode, **kwargs)
    for run in (half, full):
        if begin:
            run.inner.iterations.assign(begin)
        for step in range(STEPS):
            run.step(gradients_of(step))
    for a, b in zip(exact(half), values(full.variables), strict=True):
        assert_equal(a, b)
    for weight, rest, whole in zip(half.variables, remainders_of(half), exact(half), strict=True):
        assert (weight.dtype, rest.dtype) == ("bfloat16", "int16")
        np.testing.assert_array_equal(*values([weight, whole.astype(BFLOAT16)]))
    for (name, a), b in zip(slots_of(half).items(), slots_of(full).values(), strict=True):
        assert_equal(*values([a, b]), name)


# Keras's classes for PyTorch update in place, by products that round otherwise, as did Muon until
# Keras 3.12. There masters, below, are the oracle.
NEARLY = 1e-4
# XLA contracts a product and a sum in one of the two programs and not in the other.
CONTRACTED = dict.fromkeys(["schedule free", "average", "overwriting average"], 1e-6)


@pytest.mark.parametrize("name", few(OPTIMIZERS, "adamw", "muon"))
def test_every_optimizer_computes_in_float32(name):
    exact = {"ftrl", "adafactor", "lamb", "schedule free"}
    exact |= set() if is_before("3.13.0") else {"muon"}
    in_place = BACKEND == "torch" and name not in exact
    assert_way_of_float32(OPTIMIZERS[name], rtol=NEARLY if in_place else 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "eager"])
@pytest.mark.parametrize("name", few(OPTIMIZERS, "adam"))
def test_compiled_updates_are_those_of_float32(name, mode):
    in_xla = mode in ("xla", "jit")
    assert_way_of_float32(OPTIMIZERS[name], mode, rtol=CONTRACTED.get(name, 0) * in_xla)


@pytest.mark.only("torch")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_remainders_hold_what_float32_masters_do(name, monkeypatch):
    def steps(run):
        for step in range(STEPS):
            run.step(gradients_of(step))
        return run

    memory = {"master_weights": True, "slot_dtype": "float32"}
    split = exact(steps(run_of(OPTIMIZERS[name](), "bfloat16", **memory)))

    def with_master(optimizer, variable, name, initializer, dtype):
        return add_slot(optimizer, variable, name, initializer, dtype.replace("int16", "float32"))

    add_slot = updates.updates.add_slot
    monkeypatch.setattr(updates, "SplitView", lambda weight, rest, *_: MasterView(weight, rest))
    monkeypatch.setattr(updates.updates, "add_slot", with_master)
    run = steps(run_of(OPTIMIZERS[name](), "bfloat16", **memory))
    for a, b in zip(split, values(remainders_of(run)), strict=True):
        np.testing.assert_array_equal(a, b)


class Halving(keras.constraints.Constraint):
    """Weights are at most a sixteenth, by a factor that bfloat16 does not hold."""

    def __call__(self, w):
        w = ops.convert_to_tensor(w)
        return ops.where(ops.abs(w) > 1 / 16, w * 0.501, w)


@pytest.mark.parametrize("mode", few(MODES, "eager"))
@pytest.mark.parametrize("feature", few([*FEATURES, "constraint"], "clipnorm", "constraint"))
def test_features_compute_in_float32(feature, mode):
    def make():
        return keras.optimizers.Lamb(0.01, **FEATURES.get(feature, {}))

    in_place = BACKEND == "torch" and feature == "weight decay"
    constraint = Halving() if feature == "constraint" else None
    rtol = NEARLY if in_place else CONTRACTED.get(feature, 0) * (mode in ("xla", "jit"))
    assert_way_of_float32(make, mode, rtol=rtol, constraint=constraint)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_float32_weights_beside_half_ones_take_their_own_way(name):
    """As float32 biases and norms in a model whose kernels are in bfloat16."""
    kernel, *_ = variables_of("bfloat16")
    beside, alone = (keras.Variable(np.ones((6, 4), "float32"), name="beside") for _ in range(2))
    together = kmp.scaled(OPTIMIZERS[name](), "none")
    together.build([kernel, beside])
    by_itself = kmp.scaled(OPTIMIZERS[name](), "none")
    by_itself.build([alone])
    for step in range(STEPS):
        gradient, other = (ops.convert_to_tensor(gradients_of(step + i)[0]) for i in (0, 50))
        together.apply([gradient, other], [kernel, beside])
        by_itself.apply([other], [alone])
    np.testing.assert_allclose(*values([beside, alone]), rtol=NEARLY)


def test_schedules_and_counters_stay_exact():
    """Beyond 256 steps bfloat16 cannot count."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.999)
    assert_way_of_float32(lambda: keras.optimizers.Lamb(schedule), begin=300)


def test_a_loss_scale_changes_nothing():
    assert_way_of_float32(lambda: keras.optimizers.Ftrl(0.05), loss_scale="dynamic")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_one_step_is_the_rounding_of_float32(rounding, mode):
    """Momentum without products of two rounded factors: each backend gives the same float32."""
    make = lambda: keras.optimizers.SGD(0.5, momentum=0.5)  # noqa: E731  powers of two are exact
    half = run_of(make(), "bfloat16", mode, rounding=rounding)
    weights, momenta = values(half.variables), [np.zeros(s, "float32") for s in SHAPES.values()]
    half.optimizer.rounding_seed.assign(9)
    for step in range(STEPS):
        gradients = [g.astype(BFLOAT16).astype("float32") for g in gradients_of(step)]
        half.step(gradients)
        for i, gradient in enumerate(gradients):
            momentum = momenta[i] * np.float32(0.5) - gradient * np.float32(0.5)
            weight = weights[i] + momentum
            weights[i] = as_stored(weight, rounding, (9, step, i), 0)
            momenta[i] = as_stored(momentum, rounding, (9, step, i), 1)
    for a, b in zip(values(half.variables), weights, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(values(slots_of(half).values()), momenta, strict=True):
        np.testing.assert_array_equal(a, b)


def as_stored(x, rounding, counters, part):
    if rounding == "nearest":
        return x.astype(BFLOAT16).astype("float32")
    bits = part_of(random_bits(x.shape, *counters), part)
    rounded = stochastic_round(ops.convert_to_tensor(x), bits)
    return ops.convert_to_numpy(ops.cast(rounded, "float32"))


LARGE = {"kernel": (64, 64)}
INT8 = {"master_weights": 24, "slot_dtype": "int8"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", few(MODES, "xla", "jit"))
@pytest.mark.parametrize("memory", few([{}, {"master_weights": True}, INT8], {}, INT8), ids=str)
def test_a_skipped_step_moves_and_draws_nothing(mode, memory):
    def after(poisoned):
        scaled = kmp.scaled(keras.optimizers.Adam(0.01), loss_scale=1024, **memory)
        run = Run(scaled, mode, variables_of("bfloat16", LARGE))
        for step in range(STEPS):
            if step in poisoned:
                before = run.state()
                bad = gradients_of(0, LARGE)
                bad[0][1, 2] = np.inf
                run.step(bad)
                for name, value in run.state().items():
                    np.testing.assert_array_equal(value, before[name], err_msg=name)
            run.step(gradients_of(step, LARGE))
        return run.state()

    for (name, a), b in zip(after({1, 3}).items(), after(()).values(), strict=True):
        if "steps" not in name:
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.core
def test_sums_of_24_bits_add_up():
    """Updates of a small part of a unit in the last of 24 bits arrive on average."""
    scaled = kmp.scaled(keras.optimizers.SGD(1.0), "none", master_weights=24)
    run = Run(scaled, "eager", [keras.Variable(np.ones((64, 64)), dtype="bfloat16", name="kernel")])
    update = np.float32(2.0**-15 / 128)  # two units of float32
    for _ in range(20):
        run.step([np.full((64, 64), -update)])
    (rest,) = [v for v in run.inner.variables if v.name.endswith("_short_remainder")]
    assert rest.dtype == "int8" and np.all(values(run.variables)[0] == 1)
    moved = ops.convert_to_numpy(rest).astype("float64") * 2.0**-15
    # Each rounding has a variance below a unit squared times 1/128; those of 20 steps add up.
    assert abs(moved.mean() - 20 * update) < 5 * 2.0**-15 * np.sqrt(20 / 128 / moved.size)


@pytest.mark.parametrize("wrong", [8, 1, "true"])
def test_masters_are_all_of_float32_or_24_bits(wrong):
    with pytest.raises(ValueError, match="False, True and 24"):
        kmp.scaled("adam", master_weights=wrong)


@pytest.mark.filterwarnings("ignore:Weights in float16")
@pytest.mark.parametrize(
    ("dtype", "slot_dtype", "expected"),
    [
        ("bfloat16", None, "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", None, "float32"),
        ("float16", None, "float32"),
    ],
)
def test_slots_have_the_dtype_that_was_chosen(dtype, slot_dtype, expected):
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=2)
    scaled = kmp.scaled(optimizer, loss_scale=1024, slot_dtype=slot_dtype)
    run = Run(scaled, "eager", variables_of(dtype))
    for step in range(2):
        run.step(gradients_of(step))
    for name, slot in slots_of(run).items():
        keeps_sums = name.endswith(("_average", "_gradient_accumulator"))
        assert slot.dtype == ("float32" if keeps_sums else expected), name
    listed = [id(v) for v in scaled.variables]
    assert len(listed) == len(set(listed))
    assert all(type(v) is type(run.variables[0]) for v in scaled.variables)  # no view among them


def test_float32_is_left_to_keras():
    run = run_of(keras.optimizers.Adam(0.01), "float32")
    assert not {"update_step", "_apply_weight_decay"} & set(vars(run.inner))
    assert run.optimizer.rounding_seed is None


def test_a_weight_that_is_assigned_stays_so():
    """Its remainder is that of another one: half a unit in the last place of bfloat16 at most."""
    run = run_of(keras.optimizers.SGD(0.5), "bfloat16", master_weights=True)
    run.step(gradients_of(0))
    kernel, bias = run.variables
    kernel.assign(np.full(SHAPES["kernel"], 3.0))
    bias.assign(np.zeros(SHAPES["bias"]))
    run.step([np.zeros(shape, "float32") for shape in SHAPES.values()])
    for weight, assigned in zip(values(run.variables), (3.0, 0.0), strict=True):
        np.testing.assert_array_equal(weight, assigned)
    near, zero = exact(run)
    assert np.all(np.abs(near - 3) <= 2.0**-7) and np.all(np.abs(zero) < 1e-40)


@pytest.mark.filterwarnings("ignore:Weights in float16")
def test_float16_keeps_its_float32_copy():
    run = run_of(keras.optimizers.SGD(0.5), "float16", loss_scale=1024, master_weights=True)
    run.variables[0].assign(np.full(SHAPES["kernel"], 3.0))
    run.step([np.full(SHAPES["kernel"], 2.0**-12, "float32"), gradients_of(0)[1]])
    (master, _) = [v for v in run.inner.variables if v.name.endswith("_master")]
    np.testing.assert_array_equal(*values([master, np.full(master.shape, 3 - 2.0**-13, "float32")]))


@pytest.mark.parametrize("kwargs", [{}, {"master_weights": True}, {"slot_dtype": "float32"}])
def test_config_and_state_survive(kwargs, tmp_path):
    run = run_of(keras.optimizers.Adam(0.01), "bfloat16", **kwargs)
    run.step(gradients_of(0))
    copy = kmp.LossScaleOptimizer.from_config(run.optimizer.get_config())
    assert copy.half_memory == run.optimizer.half_memory
    other = Run(copy, "eager", variables_of("bfloat16"))
    store = {}
    run.optimizer.rounding_seed.assign(5)
    run.optimizer.save_own_variables(store)
    copy.load_own_variables(store)
    for mine, theirs in zip(run.inner.variables, copy.inner_optimizer.variables, strict=True):
        theirs.assign(mine)
    for mine, theirs in zip(run.variables, other.variables, strict=True):
        theirs.assign(mine)
    run.step(gradients_of(1))
    other.step(gradients_of(1))
    for a, b in zip(values(run.variables), values(other.variables), strict=True):
        np.testing.assert_array_equal(a, b)
    assert number(copy.rounding_seed) == 5


def test_a_state_from_before_the_first_step_leaves_the_seed_as_it_is():
    run = run_of(keras.optimizers.Adam(0.01), "bfloat16")
    run.optimizer.rounding_seed.assign(5)
    store = {}
    kmp.scaled("adam").save_own_variables(store)  # of an optimizer that is not built
    run.optimizer.load_own_variables(store)
    assert number(run.optimizer.rounding_seed) == 5


def test_a_variable_that_is_excluded_does_not_decay():
    def after(exclude):
        inner = keras.optimizers.SGD(0.5, weight_decay=0.5)
        variables = variables_of("bfloat16")
        if exclude:
            inner.exclude_from_weight_decay(var_list=variables[:1])
        run = Run(kmp.scaled(inner, loss_scale="none"), "eager", variables)
        run.step([np.zeros(s, "float32") for s in SHAPES.values()])
        return values(run.variables)

    start = values(variables_of("bfloat16"))
    excluded, decayed = after(True), after(False)
    np.testing.assert_array_equal(excluded[0], start[0])
    assert np.all(excluded[1] != start[1]) and np.all(decayed[0] != start[0])


def test_an_update_that_raises_leaves_nothing_behind():
    class Failing(keras.optimizers.SGD):
        fails = True

        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)
            if self.fails:
                raise RuntimeError("planted")

    run = run_of(Failing(0.5, momentum=0.5), "bfloat16")
    before = run.state()
    with pytest.raises(RuntimeError, match="planted"):
        run.step(gradients_of(0))
    for name, value in run.state().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    run.inner.momentums[0].assign(np.ones(SHAPES["kernel"]))  # at once, as no update is open
    assert np.all(values(slots_of(run).values())[0] == 1)
    run.inner.fails = False
    run.step(gradients_of(0))
    assert np.all(values(run.variables)[0] != before[run.variables[0].path].astype("float32"))


@pytest.mark.parametrize("by", ["map", "function", "function that makes them"])
def test_several_optimizers_in_one(by):
    lion, adam = keras.optimizers.Lion(0.01), keras.optimizers.Adam(0.01)
    choose = {
        "map": lambda: of_keras("optimizers.OptimizerMap")(adam, {"kernel": lion}),
        "function": lambda: lambda v: lion if "kernel" in v.path else adam,
        "function that makes them": lambda: lambda v: keras.optimizers.Adam(0.01),
    }[by]()
    run = run_of(of_keras("optimizers.MultiOptimizer")(choose), "bfloat16")
    start = values(run.variables)
    for step in range(3):
        run.step(gradients_of(step))
    for a, b in zip(values(run.variables), start, strict=True):
        assert np.mean(a != b) > 0.9
    assert {v.dtype for v in slots_of(run).values()} == {"bfloat16"}
    assert run.inner._optimizer_map is choose  # as for `get_config`


@pytest.mark.parametrize(
    ("argument", "value", "instead"),
    [("rounding", "up", "'stochastic'"), ("slot_dtype", "float16", "'bfloat16'")],
)
def test_wrong_choices_say_what_to_write(argument, value, instead):
    with pytest.raises(ValueError, match=f"(?s){argument}.*{value}.*{instead}"):
        kmp.scaled("adam", **{argument: value})


def test_an_optimizer_that_is_built_already_is_named():
    variables = variables_of("bfloat16")
    inner = keras.optimizers.Adam(0.01)
    inner.build(variables)
    with pytest.warns(kmp.PrecisionWarning, match="built before"):
        kmp.scaled(inner, loss_scale="none").build(variables)


def compiled_model(**memory):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(kmp.scaled("adam", loss_scale=1024, **memory), "mse")
    model.fit(np.eye(4, dtype="float32"), np.ones((4, 1), "float32"), verbose=0, epochs=3)
    return model


@pytest.mark.slow
def test_a_model_with_embeddings_trains_in_bfloat16():
    """Sparse gradients on TensorFlow, and rows that no batch has."""
    keras.config.set_dtype_policy("bfloat16")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), keras.layers.Embedding(10, 4), keras.layers.Flatten()]
    )
    model.add(kmp.layers.Float32OutputDense(1))
    model.compile(kmp.scaled("adam", loss_scale="none", learning_rate=0.01), "mse")
    words = np.random.default_rng(0).integers(5, size=(64, 3))
    before = values(model.weights)[0]
    losses = model.fit(words, words.sum(1) / 8.0, verbose=0, epochs=20).history["loss"]
    after = values(model.weights)[0]
    assert losses[-1] < losses[0] / 2
    assert np.all(after[5:] == before[5:]) and np.all(np.any(after[:5] != before[:5], axis=1))


@pytest.mark.slow
@pytest.mark.only("tensorflow")
def test_tensorflows_checkpoints_hold_the_variables_behind_the_views(tmp_path):
    import tensorflow as tf

    keras.config.set_dtype_policy("bfloat16")
    model = compiled_model()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "checkpoint")
    before = values([*model.weights, *model.optimizer.variables])
    model.fit(np.eye(4), np.zeros((4, 1)), verbose=0)
    checkpoint.restore(path)
    for a, b in zip(before, values([*model.weights, *model.optimizer.variables]), strict=True):
        np.testing.assert_array_equal(a, b)

"""What is saved resumes bit-equal; what peers saved is taken over; what does not fit is refused."""

import os
import zipfile

import keras
import numpy as np
import pytest
from keras import ops
from oracle import few, number

import kmp


def data(poisoned_rows=()):
    random = np.random.default_rng(3)
    x = random.normal(size=(48, 6)).astype("float32")
    y = x[:, :1] * 2 + 1
    x[list(poisoned_rows)] = np.inf
    return x, y


def make_model(optimizer, jit=False):
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(optimizer, loss="mse", jit_compile=jit)
    return model


def fit(model, poisoned_rows=()):
    x, y = data(poisoned_rows)
    if not model.optimizer.built:  # or TensorFlow traces the step twice
        model.optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)


def state_of(model):
    variables = model.variables + model.optimizer.variables
    return {f"{i} {v.path}": ops.convert_to_numpy(v) for i, v in enumerate(variables)}


def assert_same_state(model, other):
    expected, received = state_of(model), state_of(other)
    for (name, a), b in zip(expected.items(), received.values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def adam(**arguments):
    rule = kmp.DynamicLossScale(initial_scale=256, growth_interval=4)
    return kmp.scaled("adam", rule, learning_rate=0.05, **arguments)


@pytest.mark.parametrize("file", few(["model.keras", "model.weights.h5"], "model.keras"))
@pytest.mark.parametrize(
    "arguments", few([{}, {"gradient_accumulation_steps": 4}, {"use_ema": True}], {}), ids=str
)
def test_resumes_bit_equal(tmp_path, file, arguments):
    """An overflow before the interruption and one after it; a leftover window survives."""
    whole = make_model(adam(**arguments))
    fit(whole, poisoned_rows=[9])
    path = str(tmp_path / file)
    if file.endswith(".keras"):
        whole.save(path)
        resumed = keras.models.load_model(path)
    else:
        whole.save_weights(path)
        resumed = make_model(adam(**arguments))
        resumed.optimizer.build(resumed.trainable_variables)
        resumed.load_weights(path)
    assert_same_state(whole, resumed)
    assert resumed.optimizer.loss_scale == whole.optimizer.loss_scale
    for model in (whole, resumed):
        fit(model, poisoned_rows=[30])
    assert int(whole.optimizer.skipped_steps) == 2
    assert_same_state(whole, resumed)


@pytest.mark.parametrize("wrap", [None, "keras"], ids=["plain", "keras_loss_scale"])
@pytest.mark.parametrize("file", ["model.keras", "model.weights.h5"])
def test_takes_over_what_keras_saved(tmp_path, wrap, file):
    inner = keras.optimizers.Adam(0.05)
    optimizer = inner
    if wrap:
        optimizer = keras.optimizers.LossScaleOptimizer(inner, 64.0, dynamic_growth_steps=4)
    theirs = make_model(optimizer)
    fit(theirs)
    path = str(tmp_path / file)
    (theirs.save if file.endswith(".keras") else theirs.save_weights)(path)
    ours = make_model(kmp.scaled("adam", learning_rate=0.05))
    ours.optimizer.build(ours.trainable_variables)
    ours.load_weights(path)
    for mine, other in zip(ours.optimizer.inner_optimizer.variables, inner.variables, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(mine), ops.convert_to_numpy(other))
    assert int(ours.optimizer.iterations) == int(ours.optimizer.steps) == 6
    assert float(ours.optimizer.dynamic_scale) == (128.0 if wrap else 2.0**15)
    assert int(ours.optimizer.step_counter) == (2 if wrap else 0)


@pytest.mark.parametrize(
    "scale, expected", [(0.0, 2.0**-48), (np.inf, 2.0**24), (np.nan, 2.0**-48)]
)
def test_a_ruined_scale_of_keras_is_brought_back_into_bounds(tmp_path, scale, expected):
    theirs = make_model(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    theirs.optimizer.build(theirs.trainable_variables)
    theirs.optimizer.dynamic_scale.assign(scale)
    theirs.save_weights(str(tmp_path / "m.weights.h5"))
    ours = make_model(kmp.scaled("sgd"))
    ours.optimizer.build(ours.trainable_variables)
    ours.load_weights(str(tmp_path / "m.weights.h5"))
    assert float(ours.optimizer.dynamic_scale) == expected


@pytest.mark.parametrize(
    "rule, expected",
    [
        (kmp.DynamicLossScale(initial_scale=8, max_scale=1024), 1024.0),
        (kmp.DynamicLossScale(initial_scale=8), 2.0**15),
        (256.0, 256.0),
        ("none", 1.0),
    ],
    ids=str,
)
def test_a_stored_scale_keeps_to_the_present_rule(rule, expected):
    old, new = kmp.scaled("sgd"), kmp.scaled("sgd", loss_scale=rule)
    stored = {}
    for optimizer in (old, new):
        optimizer.build([keras.Variable([1.0])])
    old.save_own_variables(stored)
    new.load_own_variables(stored)
    assert float(new.dynamic_scale) == expected


def test_the_state_is_stored_once(tmp_path):
    sizes = {}
    for name, optimizer in (
        ("bare", keras.optimizers.Adam()),
        ("kmp", kmp.scaled("adam")),
        ("keras", keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())),
    ):
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256)])
        model.compile(optimizer, loss="mse")
        model.optimizer.build(model.trainable_variables)
        model.save(tmp_path / f"{name}.keras")
        with zipfile.ZipFile(tmp_path / f"{name}.keras") as archive:
            sizes[name] = archive.getinfo("model.weights.h5").file_size
    slots = 2 * 4 * (256 * 256 + 256)
    assert sizes["kmp"] - sizes["bare"] < 0.1 * slots  # HDF5's own bookkeeping
    assert sizes["keras"] - sizes["bare"] > slots  # the peer's defect, so that we notice its end


@pytest.mark.parametrize("other", ["sgd", "other_model"])
def test_a_foreign_state_is_refused_and_changes_nothing(other):
    theirs = make_model(kmp.scaled("sgd") if other == "sgd" else adam(amsgrad=True))
    fit(theirs)
    ours = make_model(adam())
    fit(ours)
    before = state_of(ours)
    store = {}
    theirs.optimizer.save_own_variables(store)
    with pytest.raises(ValueError, match=r"does not fit Adam of this model.*Compile with"):
        ours.optimizer.load_own_variables(store)
    after = state_of(ours)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_an_incomplete_state_is_refused_and_changes_nothing():
    model = make_model(adam())
    fit(model, poisoned_rows=[0])
    before = float(model.optimizer.dynamic_scale)
    store = {}
    model.optimizer.save_own_variables(store)
    del store["skipped_steps"]
    store["dynamic_scale"] = np.float32(4.0)
    with pytest.raises(ValueError, match="skipped_steps"):
        model.optimizer.load_own_variables(store)
    assert float(model.optimizer.dynamic_scale) == before != 4.0


def test_a_truncated_file_is_refused_and_changes_nothing(tmp_path):
    model = make_model(adam())
    fit(model)
    path = str(tmp_path / "m.weights.h5")
    model.save_weights(path)
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) // 2)
    before = state_of(model)
    with pytest.raises(OSError, match="truncated"):
        model.load_weights(path)
    for name, value in state_of(model).items():
        np.testing.assert_array_equal(before[name], value, err_msg=name)


def test_measuring_may_be_switched_between_runs(tmp_path):
    model = make_model(adam())
    fit(model, poisoned_rows=[0])
    model.save_weights(str(tmp_path / "m.weights.h5"))
    silent = make_model(
        kmp.LossScaleOptimizer(keras.optimizers.Adam(0.05), measure_gradients=False)
    )
    silent.optimizer.build(silent.trainable_variables)
    silent.load_weights(str(tmp_path / "m.weights.h5"))
    assert int(silent.optimizer.skipped_steps) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_grad_scaler_state_goes_both_ways(dtype):
    keras.config.set_dtype_policy(dtype)
    model = make_model(adam())
    assert {v.dtype for v in model.trainable_variables} == {dtype}
    model.optimizer.build(model.trainable_variables)
    theirs = {
        "scale": 2.0**10,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 3,
        "_growth_tracker": 2,
    }
    model.optimizer.load_state(theirs)
    assert model.optimizer.state() == theirs
    fit(model)  # six finite steps: growth after the first and the fourth
    assert float(model.optimizer.dynamic_scale) == 2.0**14
    assert int(model.optimizer.step_counter) == 2


@pytest.mark.only("torch")
def test_a_real_grad_scaler_takes_the_state():
    torch = pytest.importorskip("torch")
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    model = make_model(adam())
    model.optimizer.build(model.trainable_variables)
    model.optimizer.load_state(scaler.state_dict())
    assert float(model.optimizer.dynamic_scale) == 512.0
    scaler.load_state_dict(model.optimizer.state())
    assert scaler.state_dict() == model.optimizer.state()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"_growth_tracker": -1}, "_growth_tracker"),
        ({"_growth_tracker": None}, "_growth_tracker"),
        ({"extra": 1}, "keys"),
    ],
    ids=str,
)
def test_a_bad_grad_scaler_state_changes_nothing(change, message):
    model = make_model(adam())
    model.optimizer.build(model.trainable_variables)
    before = model.optimizer.state()
    with pytest.raises(ValueError, match=message):
        model.optimizer.load_state({**before, **change})
    assert model.optimizer.state() == before


def states_of(optimizer):
    return [ops.convert_to_numpy(v) for v in optimizer.variables]


def file_of(optimizer, variables):
    """What `optimizer` stores of itself after a step on `variables`."""
    optimizer.build(variables)
    optimizer.scale_loss(0.0)
    optimizer.apply([ops.ones(v.shape) for v in variables], variables)
    store = {}
    optimizer.save_own_variables(store)
    return store


def of_shapes(*shapes):
    return [
        keras.Variable(np.ones(shape, "float32"), name=f"w{i}") for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    ("stored", "live", "message"),
    [
        (("adam", [(2, 3)]), ("adadelta", [(2, 3)]), "'momentum' of shape .* 'accumulated_grad"),
        (("adam", [(2, 3)]), ("adam", [(3, 2)]), r"shape \(2, 3\) where this one .* \(3, 2\)"),
        (("adam", [(2, 3), (6,)]), ("adam", [(6,), (2, 3)]), r"'momentum' of shape \(2, 3\)"),
    ],
    ids=["another_optimizer", "transposed", "in_another_order"],
)
def test_state_of_as_many_numbers_is_told_apart(stored, live, message):
    store = file_of(kmp.scaled(stored[0]), of_shapes(*stored[1]))
    optimizer = kmp.scaled(live[0])
    optimizer.build(of_shapes(*live[1]))
    before = states_of(optimizer)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        optimizer.load_own_variables(store)
    for old, new in zip(before, states_of(optimizer), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_names_of_layers_may_differ():
    """Another instance of a model numbers its layers differently."""
    store = file_of(
        kmp.scaled("adam"), [keras.Variable(np.ones(2, "float32"), name="dense_kernel")]
    )
    optimizer = kmp.scaled("adam")
    optimizer.build([keras.Variable(np.ones(2, "float32"), name="dense_7_kernel")])
    optimizer.load_own_variables(store)
    assert int(ops.convert_to_numpy(optimizer.steps)) == 1


def test_a_variable_that_keras_numbered_itself_is_known_by_its_place(tmp_path):
    """Nadam's product of momenta has no name: Keras counts such variables across the process."""
    model = make_model(kmp.scaled(keras.optimizers.Nadam(0.05)))
    fit(model)
    model.save(tmp_path / "model.keras")
    assert_same_state(model, keras.models.load_model(tmp_path / "model.keras"))
    model.save_weights(tmp_path / "model.weights.h5")
    other = make_model(kmp.scaled(keras.optimizers.Nadam(0.05)))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same_state(model, other)


def test_a_counter_means_nothing_to_another_rule():
    """Dynamic counts up to the next growth, Amax down to its next look at the gradients."""
    dynamic = kmp.scaled("sgd", kmp.DynamicLossScale(64, growth_interval=2000))
    store = file_of(dynamic, of_shapes((2,)))
    store["step_counter"] = np.int32(1999)
    amax = kmp.scaled("sgd", kmp.AmaxLossScale())
    amax.build(of_shapes((2,)))
    amax.load_own_variables(store)
    assert int(amax.scale_state.wait) == int(amax.scale_state.zero_steps) == 0
    again = kmp.scaled("sgd", kmp.DynamicLossScale(64, growth_interval=2000))
    again.build(of_shapes((2,)))
    again.load_own_variables(store)
    assert int(ops.convert_to_numpy(again.step_counter)) == 1999


def test_a_run_without_loss_scaling_has_found_no_scale():
    """At the 1 that it stored, a dynamic scale would begin 15 growths below its initial one."""
    store = file_of(kmp.scaled("sgd", "none"), of_shapes((2,)))
    for rule, expected in (("dynamic", 2.0**15), (kmp.DynamicLossScale(64), 64.0), (8.0, 8.0)):
        optimizer = kmp.scaled("sgd", rule)
        optimizer.build(of_shapes((2,)))
        optimizer.load_own_variables(store)
        assert float(ops.convert_to_numpy(optimizer.dynamic_scale)) == expected


@pytest.mark.only("torch")
def test_state_may_lie_where_numpy_cannot_read_it():
    """As bfloat16 does on a GPU. A tensor that requires a gradient is refused by NumPy too."""
    import torch

    store = file_of(kmp.scaled("adam"), of_shapes((2,)))
    slots = {key: value for key, value in store.items() if value.dtype.kind == "f"}
    tensors = {key: torch.tensor(x, requires_grad=True) for key, x in slots.items()}
    loaded = kmp.scaled("adam")
    loaded.build(of_shapes((2,)))
    loaded.load_own_variables(store | tensors)
    again: dict = {}
    loaded.save_own_variables(again)
    for key, value in slots.items():
        np.testing.assert_array_equal(again[key], value)


def test_a_countdown_is_no_growth_tracker():
    amax = kmp.scaled("sgd", kmp.AmaxLossScale())
    amax.build(of_shapes((2,)))
    amax.scaled_step.counters.rule.wait.assign(1500)
    assert amax.state()["_growth_tracker"] == 0


@pytest.mark.parametrize(("count", "wait", "zero_steps"), [(-3, 0, 3), (1500, 1500, 0)])
def test_the_signed_count_of_kmp_0_1_is_loaded(count, wait, zero_steps):
    """AmaxLossScale counted steps of zeros below 0, in the variable of Keras's `step_counter`."""
    store = file_of(kmp.scaled("sgd", kmp.AmaxLossScale(initial_scale=2.0**12)), of_shapes((2,)))
    del store["loss_scale_wait"], store["loss_scale_zero_steps"]
    store["step_counter"] = np.int32(count)
    loaded = kmp.scaled("sgd", kmp.AmaxLossScale())
    loaded.build(of_shapes((2,)))
    loaded.load_own_variables(store)
    state = loaded.scale_state
    assert [number(x) for x in state] == [store["dynamic_scale"], wait, zero_steps, 0]
    assert number(loaded.step_counter) == 0


@pytest.mark.parametrize("damage", [{"step_counter": np.int32(-7)}, {"inner_sizes": None}])
def test_damaged_state_is_refused_and_changes_nothing(damage):
    store = file_of(kmp.scaled("sgd"), of_shapes((2,)))
    store.update(damage)
    store = {key: value for key, value in store.items() if value is not None}
    optimizer = kmp.scaled("sgd")
    optimizer.build(of_shapes((2,)))
    before = states_of(optimizer)
    with pytest.raises(ValueError, match=next(iter(damage))):
        optimizer.load_own_variables(store)
    for old, new in zip(before, states_of(optimizer), strict=True):
        np.testing.assert_array_equal(old, new)

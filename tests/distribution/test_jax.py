"""keras.distribution: one program over eight devices; a shard that overflows is everybody's."""

import math
import re

import keras
import numpy as np
import pytest
from keras import ops
from oracle import compilations

import kmp
from kmp.health import details
from kmp.health.telemetry import COLUMNS

jax = pytest.importorskip("jax")
NamedSharding, PartitionSpec = jax.sharding.NamedSharding, jax.sharding.PartitionSpec

pytestmark = [pytest.mark.only("jax"), pytest.mark.slow]

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
BATCH, FEATURES, HIDDEN, UNITS = 16, 4, 8, 4
# Rows of a batch: on eight devices each holds two, on a mesh of four rows each holds four.
OVERFLOWS = {"none": [], "first": [0], "last": [BATCH - 1], "all": range(BATCH)}


def data_parallel():
    return keras.distribution.DataParallel(devices=keras.distribution.list_devices("cpu")[:8])


def model_parallel(rows, columns):
    """The batch over the rows of a mesh, the kernels over its columns."""
    devices = keras.distribution.list_devices("cpu")[: rows * columns]
    mesh = keras.distribution.DeviceMesh((rows, columns), ["batch", "model"], devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*first/kernel"] = (None, "model")
    layout[".*second/kernel"] = ("model", None)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


DISTRIBUTIONS = {
    "data_parallel": data_parallel,
    "model_parallel": lambda: model_parallel(4, 2),
}


@pytest.fixture(autouse=True)
def no_distribution_left():
    yield
    keras.distribution.set_distribution(None)


def linear_loss(y_true, y_pred):
    """Its gradient does not depend on the prediction: small integers stay exact for some steps."""
    return ops.sum(y_true * y_pred, axis=-1)


def integers(*shape, seed):
    """-1, 0 and 1, half of them 0."""
    return np.random.default_rng(seed).choice(np.float32([-1, 0, 0, 1]), shape)


def make_model(optimizer, loss=linear_loss, jit=True):
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(HIDDEN, use_bias=False, name="first"),
            keras.layers.Dense(UNITS, use_bias=False, name="second"),
        ]
    )
    model.set_weights(
        [integers(FEATURES, HIDDEN, seed=1), integers(HIDDEN, UNITS, seed=2)],
    )
    model.compile(optimizer, loss=loss, jit_compile=jit)
    return model


def fit(model, poisoned_step=None, rows=(), steps=1):
    x = integers(steps * BATCH, FEATURES, seed=3)
    y = integers(steps * BATCH, UNITS, seed=4)
    if poisoned_step is not None:
        y[[poisoned_step * BATCH + row for row in rows]] = np.inf
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def numbers(variables):
    return {v.path: ops.convert_to_numpy(v) for v in variables}


def assert_same(expected, received):
    assert expected.keys() == received.keys()
    for path in expected:
        np.testing.assert_array_equal(received[path], expected[path], err_msg=path)


def sgd(**arguments):
    """The learning rate undoes the division by the batch: multiples of 1/4 after three steps."""
    rule = kmp.DynamicLossScale(initial_scale=1024, growth_interval=100)
    return kmp.scaled("sgd", rule, learning_rate=float(BATCH), momentum=0.5, **arguments)


def assert_distributed(model, distribution):
    """What is compared below really lies in shards on several devices."""
    kernel = model.trainable_variables[0].value
    assert len(kernel.sharding.device_set) == distribution.device_mesh.devices.size
    sharded = isinstance(distribution, keras.distribution.ModelParallel)
    assert kernel.sharding.is_fully_replicated != sharded
    momentum = model.optimizer.inner_optimizer.momentums[0].value
    assert momentum.sharding.is_equivalent_to(kernel.sharding, 2)


@pytest.mark.parametrize("overflow", [name for name in OVERFLOWS if name != "none"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_an_overflow_in_any_shard_skips_the_step(name, overflow):
    distribution = DISTRIBUTIONS[name]()
    keras.distribution.set_distribution(distribution)
    model = make_model(sgd())
    fit(model, steps=2)  # so that the momenta are something to lose
    assert_distributed(model, distribution)
    optimizer = model.optimizer
    before = numbers(model.variables + optimizer.inner_optimizer.variables)
    fit(model, poisoned_step=0, rows=OVERFLOWS[overflow])
    assert_same(before, numbers(model.variables + optimizer.inner_optimizer.variables))
    assert float(optimizer.dynamic_scale) == 512.0
    assert int(optimizer.iterations) == 2
    assert int(optimizer.steps) == 3
    assert int(optimizer.skipped_steps) == int(optimizer.consecutive_skips) == 1
    assert int(optimizer.step_counter) == 0
    np.testing.assert_array_equal(ops.convert_to_numpy(optimizer.gradient_health)[:, 4], [1, 1])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_single_bad_column_of_a_sharded_kernel_is_enough(name):
    """Only the last unit's target is inf: of the second kernel's gradient, one column."""
    keras.distribution.set_distribution(DISTRIBUTIONS[name]())
    model = make_model(sgd())
    before = numbers(model.variables)
    x, y = integers(BATCH, FEATURES, seed=3), integers(BATCH, UNITS, seed=4)
    y[-1, -1] = np.inf
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert_same(before, numbers(model.variables))
    assert float(model.optimizer.dynamic_scale) == 512.0
    nonfinite = ops.convert_to_numpy(model.optimizer.gradient_health)[:, 3]
    assert nonfinite[1] == HIDDEN


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_training_and_telemetry_equal_a_single_device(name, overflow):
    """Bit for bit: weights, momenta, scale, counters and the health matrix, also after a skip.

    Every number is a small multiple of a power of two, so that no order of summation rounds; that
    this is so is checked against float64 below.
    """
    received = {}
    for distribution in (None, DISTRIBUTIONS[name]()):
        keras.distribution.set_distribution(distribution)
        model = make_model(sgd())
        for steps in (1, 2):
            fit(model, poisoned_step=0, rows=OVERFLOWS[overflow], steps=steps)
            received[distribution is None, steps] = numbers(
                model.variables + model.optimizer.variables
            )
        if distribution is not None:
            assert_distributed(model, distribution)
        keras.utils.clear_session()
    for steps in (1, 2):
        assert_same(received[True, steps], received[False, steps])


def test_the_integers_are_exact():
    """The run that the others are compared with equals one in float64."""
    model = make_model(sgd())
    for steps in (1, 2):
        fit(model, steps=steps)
    first, second = (integers(FEATURES, HIDDEN, seed=1), integers(HIDDEN, UNITS, seed=2))
    weights = [first.astype("float64"), second.astype("float64")]
    momenta = [0 * w for w in weights]
    for rows in (slice(BATCH), slice(BATCH), slice(BATCH, None)):
        inputs = integers(2 * BATCH, FEATURES, seed=3)[rows].astype("float64")
        targets = integers(2 * BATCH, UNITS, seed=4)[rows].astype("float64") / BATCH
        gradients = [inputs.T @ (targets @ weights[1].T), (inputs @ weights[0]).T @ targets]
        momenta = [0.5 * m - BATCH * g for m, g in zip(momenta, gradients, strict=True)]
        weights = [w + m for w, m in zip(weights, momenta, strict=True)]
    for weight, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(weight, expected)
    squares = [np.sum(g**2) for g in gradients]
    assert all(np.float32(s) == s for s in squares)  # the norms round once, at the root
    health = ops.convert_to_numpy(model.optimizer.gradient_health)
    expected = [
        [np.sqrt(s), np.abs(g).max(), np.mean(g == 0), 0, 0]
        for s, g in zip(squares, gradients, strict=True)
    ]
    np.testing.assert_array_equal(health, np.float32(expected), err_msg=str(COLUMNS))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "clip", [{"clipnorm": 0.25}, {"global_clipnorm": 0.25}, {"clipvalue": 0.125}], ids=str
)
def test_clipping_sees_the_whole_gradient(name, clip):
    """Its norm is that over all shards, and the shards of one kernel are scaled alike."""
    keras.distribution.set_distribution(DISTRIBUTIONS[name]())
    model = make_model(kmp.scaled("sgd", learning_rate=1.0, **clip))
    fit(model)
    first, second = integers(FEATURES, HIDDEN, seed=1), integers(HIDDEN, UNITS, seed=2)
    x, y = integers(BATCH, FEATURES, seed=3), integers(BATCH, UNITS, seed=4) / BATCH
    gradients = [x.T @ (y @ second.T), (x @ first).T @ y]
    norms = [np.linalg.norm(g) for g in gradients]
    if "global_clipnorm" in clip:
        norms = [np.hypot(*norms)] * 2
    assert min(norms) > 0.25
    for received, start, gradient, norm in zip(
        model.get_weights(), (first, second), gradients, norms, strict=True
    ):
        clipped = np.clip(gradient, -0.125, 0.125)
        if "clipvalue" not in clip:
            clipped = gradient * (0.25 / norm)
        # Root, quotient, product and difference round once each, at numbers below 2.
        np.testing.assert_allclose(received, start - clipped, rtol=0, atol=4 * 2.0**-23)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_real_numbers_stay_within_the_rounding_of_their_sums(name):
    """Two orders of summing n numbers differ by 2 n u sum|x|, u = 2**-24; descent contracts it."""
    steps, rate, u = 20, 0.05, 2.0**-24
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (steps * BATCH, FEATURES)).astype("float32")
    y = x @ random.uniform(-1, 1, (FEATURES, UNITS)).astype("float32")
    weights = []
    for distribution in (None, DISTRIBUTIONS[name]()):
        keras.distribution.set_distribution(distribution)
        model = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(UNITS, use_bias=False, name="second")]
        )
        model.set_weights([np.ones((FEATURES, UNITS), "float32")])
        model.compile(kmp.scaled("sgd", learning_rate=rate), loss="mse")
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        weights.append(model.get_weights()[0])
        keras.utils.clear_session()
    # |x| <= 1 and |weights - true weights| <= 2 at the start bound every residual by 2 FEATURES,
    # and the mean over BATCH * UNITS residuals times 2 |x| every gradient by 4 FEATURES / UNITS.
    # A residual is a sum of FEATURES + 1 terms, a gradient one of BATCH terms.
    largest_gradient = 4 * FEATURES / UNITS
    a_step = 2 * (BATCH + FEATURES + 4) * u * largest_gradient * rate + 2 * u * 2
    bound = np.sqrt(FEATURES) * steps * a_step  # contraction is in the norm of a unit's weights
    np.testing.assert_allclose(weights[1], weights[0], rtol=0, atol=bound)
    assert np.abs(weights[0] - 1).max() > 1000 * bound  # it did train


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("memory", [{}, {"master_weights": True}], ids=str)
def test_bfloat16_weights_are_rounded_as_on_one_device(name, memory):
    """Each device draws the random numbers of the part of a variable that it holds."""

    def trained():
        optimizer = kmp.scaled(keras.optimizers.Lion(0.01), loss_scale=1024, **memory)
        keras.config.set_dtype_policy("bfloat16")
        try:
            model = make_model(optimizer)
        finally:
            keras.config.set_dtype_policy("float32")
        fit(model, poisoned_step=1, rows=[3], steps=4)
        assert int(optimizer.skipped_steps) == 1
        return model

    alone = trained()
    keras.distribution.set_distribution(DISTRIBUTIONS[name]())
    model = trained()
    if name == "model_parallel":
        slots = [v for v in model.optimizer.inner_optimizer.variables if len(v.shape) > 1]
        assert len(slots) == 4 if memory else 2
        assert not any(v.value.sharding.is_fully_replicated for v in slots)
    keras.distribution.set_distribution(None)
    for a, b in zip(alone.weights, model.weights, strict=True):
        assert a.dtype == b.dtype == "bfloat16"
        np.testing.assert_array_equal(*numbers_as_float32([a, b]))
    inner = (each.optimizer.inner_optimizer.variables for each in (alone, model))
    for a, b in zip(*inner, strict=True):
        np.testing.assert_array_equal(*numbers_as_float32([a, b]), err_msg=a.path)


def test_slots_of_8_bits_lie_where_their_weights_lie():
    """No group lies on two devices, and the scales are split as the codes are."""

    def trained():
        memory = {"master_weights": 24, "slot_dtype": "int8"}
        optimizer = kmp.scaled(keras.optimizers.Lion(0.01), loss_scale=1024, **memory)
        half = {"use_bias": False, "dtype": "bfloat16"}
        layers = [keras.layers.Dense(64, name=name, **half) for name in ("first", "second")]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.set_weights([integers(64, 64, seed=i) for i in (1, 2)])
        model.compile(optimizer, loss=linear_loss, jit_compile=True)
        # In a third step the sums of a product are no whole numbers, and bfloat16 rounds them.
        x, y = integers(2 * BATCH, 64, seed=3), integers(2 * BATCH, 64, seed=4)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return model

    alone = trained()
    keras.distribution.set_distribution(DISTRIBUTIONS["model_parallel"]())
    model = trained()
    inner = [each.optimizer.inner_optimizer.variables[2:] for each in (alone, model)]
    assert {v.dtype for v in inner[1]} == {"int8", "bfloat16"}  # remainders, codes and scales
    assert not any(v.value.sharding.is_fully_replicated for v in inner[1])
    keras.distribution.set_distribution(None)
    for a, b in zip([*inner[0], *alone.weights], [*inner[1], *model.weights], strict=True):
        np.testing.assert_array_equal(*numbers_as_float32([a, b]), err_msg=a.path)


def numbers_as_float32(variables):
    return [ops.convert_to_numpy(ops.cast(v, "float32")) for v in variables]


def dense_model():
    model = keras.Sequential([keras.Input((512,))])
    model.add(keras.layers.Dense(2048, use_bias=False, name="first"))
    model.add(keras.layers.Dense(UNITS, use_bias=False, name="second"))
    return model


def attention_model():
    x = inputs = keras.Input((8, 64))
    for _ in range(2):
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 16)(normed, normed)
        x = x + keras.layers.Dense(64)(keras.layers.Dense(128, "relu")(x))
    return keras.Model(inputs, x)


def collectives(optimizer, watch=False, make=dense_model):
    """Bytes that a step gathers and permutes, and its all-reduces. Four devices split kernels."""
    import jax

    distribution = model_parallel(2, 4)
    layouts = distribution._layout_map
    layouts[".*(query|key|value)/kernel"] = (None, "model", None)
    layouts[".*attention_output/kernel"] = ("model", None, None)
    keras.distribution.set_distribution(distribution)
    model = make()
    model.compile(optimizer, "mse", auto_scale_loss=False)
    ends = model.inputs[0], model.outputs[0]
    data = tuple(np.zeros((BATCH, *x.shape[1:]), "float32") for x in ends)
    model._symbolic_build(data_batch=data)
    if watch:
        optimizer.sample_gradients(1)
    state = tuple(
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
            model.metrics_variables,
        )
    )
    rows = jax.sharding.PartitionSpec("batch")
    rows = jax.sharding.NamedSharding(distribution.device_mesh.backend_mesh, rows)
    data = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for x in data)
    text = jax.jit(model.train_step, donate_argnums=0).lower(state, data).compile().as_text()
    results = re.findall(r" = (.*?) (?:all-gather|all-to-all|collective-permute)\(", text)
    shapes = [x for result in results for x in re.findall(r"[fs]32\[([\d,]*)\]", result)]
    moved = sum(4 * math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)
    return moved, len(re.findall(r" all-reduce(?:-start)?\(", text))


@pytest.mark.parametrize("make", [dense_model, attention_model])
def test_measuring_gathers_nothing(make):
    """Each device measures its shards; the sums and the maxima of all are reduced in one go each.

    CPUs look for inf and NaN first, and measure in a branch: one reduction, and two. The small
    gradients of attention are measured with the check, by two more. Watching adds two. (Unless
    gradients lie as their variables do, XLA gathers 166 KB here for their readers.)
    """
    plain, reductions = collectives(keras.optimizers.Adam(), make=make)
    biases = 0 if make is dense_model else 2 * 3 * 64 * 4  # whose gradients are made in shards
    more = 3 if make is dense_model else 5
    for watch in (False, True):
        moved, found = collectives(kmp.scaled("adam"), watch, make)
        assert moved - plain <= biases
        assert found - reductions <= more + 2 * watch


LAYOUTS = {
    "whole": None,
    "columns": (None, "model"),
    "rows": ("model", None),
    "both": ("batch", "model"),
    "crosswise": ("model", "batch"),
    "over_the_batch": ("batch", None),
    "absent": ("batch", "model"),  # it has no gradient
    "small": None,
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("overflow", [None, *(name for name in LAYOUTS if name != "absent")])
def test_all_that_is_measured_equals_a_single_device(overflow, jit):
    """However variables are split: levels, exponents, norms of weights and updates, the culprit."""
    import jax

    def measured():
        shapes = {name: (8, 16) for name in LAYOUTS} | {"small": (3,)}
        variables = [
            keras.Variable(integers(*shape, seed=i), name=name)
            for i, (name, shape) in enumerate(shapes.items())
        ]
        gradients = [8 * integers(*v.shape, seed=10 + i) for i, v in enumerate(variables)]
        names = list(LAYOUTS)
        gradients[names.index("absent")] = None
        if overflow is not None:
            gradients[names.index(overflow)].flat[-1] = np.inf
        optimizer = kmp.scaled("sgd", kmp.DynamicLossScale(initial_scale=8), learning_rate=0.5)
        optimizer.build(variables)
        optimizer.sample_gradients(1)

        def step(state, weights):
            optimizer.stateless_scale_loss(state, 1.0)
            return optimizer.stateless_apply(state, gradients, weights)

        given = [v.value for v in optimizer.variables], [v.value for v in variables]
        weights, state = (jax.jit(step) if jit else step)(*given)
        return variables, weights, optimizer.variables, state

    _, alone, _, expected = measured()
    devices = keras.distribution.list_devices("cpu")[:8]
    mesh = keras.distribution.DeviceMesh((4, 2), ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    for name, axes in LAYOUTS.items():
        if axes is not None:
            layouts[name] = axes
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts))
    variables, weights, kept, state = measured()
    assert sum(not v.value.sharding.is_fully_replicated for v in variables) == 6
    for variable, one, other in zip(variables, alone, weights, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=variable.path)
    for variable, one, other in zip(kept, expected, state, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=variable.path)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize(
    ("axes", "split"), [((None, "model"), (1, 2)), (("model", "batch"), (2, 4)), (None, (1, 1))]
)
def test_each_device_samples_every_few_numbers_of_its_piece(axes, split, jit):
    """A variable of 65,536 numbers, of which 4,096 are sampled at most; the same by NumPy."""
    import jax

    devices = keras.distribution.list_devices("cpu")[:8]
    layouts = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh((4, 2), ["batch", "model"], devices)
    )
    layouts["other"] = ("batch", "model")  # or nothing would be split in the last case
    if axes is not None:
        layouts["large"] = axes
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts))
    values = np.arange(256 * 256, dtype="float32").reshape(256, 256) % 127 - 63
    other = np.ones((8, 8), "float32")
    variables = [keras.Variable(values, name="large"), keras.Variable(other, name="other")]
    optimizer = kmp.scaled("sgd", 1.0, learning_rate=1.0)
    optimizer.build(variables)
    optimizer.sample_gradients(1)
    gradients = [np.where(values > 0, 2.0, 0.0).astype("float32"), other]

    def step(state, weights):
        optimizer.stateless_scale_loss(state, 1.0)
        return optimizer.stateless_apply(state, gradients, weights)

    given = [v.value for v in optimizer.variables], [v.value for v in variables]
    _, state = (jax.jit(step) if jit else step)(*given)
    names = [v.name for v in optimizer.variables]
    weight_norm, update_norm, _, *bins = np.asarray(state[names.index("gradient_details")])[0]

    # An eager step samples whole variables, by the strides of a whole one.
    split = split if jit else (1, 1)
    cut = details.cut((256, 256), tuple(256 // n for n in split))
    assert max(cut.strides) > 1
    shards = [x for half in np.split(values, split[0]) for x in np.split(half, split[1], axis=1)]
    every = tuple(slice(None, None, stride) for stride in cut.strides)
    before = np.concatenate([x[every].ravel() for x in shards])
    update = np.where(before > 0, 2.0, 0.0)
    # At most 4,096 squares of at most 63 sum to less than 2**24, exactly; root and product round.
    whole = np.sqrt(values.size / before.size)
    norms = [whole * np.linalg.norm(x) for x in (before - update, update)]
    np.testing.assert_allclose([weight_norm, update_norm], norms, rtol=4 * 2.0**-24)
    moved = (update > 0).sum()
    assert bins[0] == before.size - moved and max(bins[1:]) == sum(bins[1:]) == moved


def test_an_eager_step_of_split_variables_compiles_nothing_anew():
    keras.distribution.set_distribution(model_parallel(4, 2))
    model = make_model(sgd())
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    optimizer.sample_gradients(1)
    assert optimizer.inner_optimizer.momentums[0].value.sharding.spec[1] == "model"
    gradients = [ops.ones(v.shape) for v in model.trainable_variables]
    for _ in range(2):
        with compilations() as heard:
            optimizer.scale_loss(1.0)
            optimizer.apply(gradients)
    assert not heard


# Arrays that the user lays on a mesh, of which `keras.distribution` knows nothing


def compiled_by_hand(wrap):
    """A step of a custom loop whose kernels lie on a mesh of the user's own, compiled."""
    mesh = jax.make_mesh((4, 2), ("batch", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = [PartitionSpec(None, "model"), PartitionSpec("model", None)]
    model = make_model(None)
    for v, spec in zip(model.trainable_variables, specs, strict=True):
        v.assign(jax.device_put(v.value, NamedSharding(mesh, spec)))
    optimizer = wrap(keras.optimizers.SGD(float(BATCH), momentum=0.5))
    optimizer.build(model.trainable_variables)
    for slot, spec in zip(optimizer.variables[-2:], specs, strict=True):
        slot.assign(jax.device_put(slot.value, NamedSharding(mesh, spec)))
    for v in optimizer.variables[:-2]:
        v.assign(jax.device_put(v.value, NamedSharding(mesh, PartitionSpec())))

    def step(weights, state, x, y):
        def loss_of(weights):
            loss = ops.mean(linear_loss(y, model.stateless_call(weights, [], x)[0]))
            return loss if wrap is plain else optimizer.stateless_scale_loss(state, loss)

        return optimizer.stateless_apply(state, jax.grad(loss_of)(weights), weights)

    weights = [v.value for v in model.trainable_variables]
    state = [v.value for v in optimizer.variables]
    data = NamedSharding(mesh, PartitionSpec("batch"))
    x, y = (jax.device_put(integers(BATCH, n, seed=n), data) for n in (FEATURES, UNITS))
    out = jax.tree.map(lambda x: x.sharding, (weights, state))
    program = jax.jit(step, out_shardings=out).lower(weights, state, x, y).compile()
    return program.as_text(), program(weights, state, x, y)[0]


def plain(optimizer):
    return optimizer


def wrapped(optimizer):
    return kmp.scaled(optimizer, kmp.DynamicLossScale(initial_scale=1024))


def test_arrays_that_the_user_has_laid_on_a_mesh_are_measured_where_they_lie():
    """Two all-reduces more than plain, as with `keras.distribution`, and no gather."""
    (bare, expected), (text, received) = compiled_by_hand(plain), compiled_by_hand(wrapped)
    for mine, theirs in zip(received, expected, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(mine), ops.convert_to_numpy(theirs))
    more = {x: len(re.findall(rf" {x}(-start)?\(", text)) for x in COLLECTIVES}
    for name in COLLECTIVES:
        more[name] -= len(re.findall(rf" {name}(-start)?\(", bare))
    assert more == {**dict.fromkeys(COLLECTIVES, 0), "all-reduce": 2}

"""The published examples of JMP, NeurAI, PyTorch and Genesis, with only the names changed."""

import pathlib
import re

import keras
import numpy as np
import pytest
from keras import ops
from oracle import MODES, compiled

import kmp

GUIDE = pathlib.Path(__file__).parent.parent / "docs" / "migrating.md"


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


# ---- JMP's README: policies

half, full = np.dtype("float16"), np.dtype("float32")


@pytest.mark.parametrize("mode", MODES)
def test_jmp_policies(mode):
    my_policy = kmp.Policy(compute_dtype=half, param_dtype=full, output_dtype=half)

    def layer(params, x):
        params, x = my_policy.cast_to_compute((params, x))
        w, b = params
        y = x @ w + b
        return my_policy.cast_to_output(y)

    w = ops.ones((3, 2), dtype=my_policy.param_dtype)
    b = ops.zeros(2, dtype=my_policy.param_dtype)
    y = compiled(layer, mode)((w, b), ops.ones((4, 3)))
    assert dtype_of(y) == half and dtype_of(w) == full

    my_policy = my_policy.with_output_dtype(full)
    assert dtype_of(compiled(lambda p, x: layer(p, x), mode)((w, b), ops.ones((4, 3)))) == full


def test_jmp_policies_from_strings():
    my_policy = kmp.get_policy("params=float32,compute=float16,output=float32")
    assert (my_policy.param_dtype, my_policy.compute_dtype) == ("float32", "float16")
    assert my_policy.output_dtype == "float32"
    float16 = kmp.get_policy("float16")
    assert {float16.param_dtype, float16.compute_dtype, float16.output_dtype} == {"float16"}
    half = kmp.get_policy("half")
    assert half.compute_dtype == kmp.half_dtype()


# ---- JMP's README: loss scaling


@pytest.mark.parametrize("mode", MODES)
def test_jmp_static_loss_scale(mode):
    loss_scale = kmp.StaticLossScale(2.0**15)
    state = loss_scale.init()

    def train_step(params, x):
        loss = loss_scale.scale(ops.sum(params * x), state)
        grads = loss_scale.unscale(x * loss_scale.scale(1.0, state), state)
        return params - 0.1 * grads, loss

    params, loss = compiled(train_step, mode)(ops.ones(2), ops.array([1.0, 2.0]))
    assert ops.convert_to_numpy(loss) == 3 * 2**15
    assert np.allclose(ops.convert_to_numpy(params), [0.9, 0.8], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_jmp_dynamic_loss_scale(mode):
    loss_scale = kmp.DynamicLossScale(2.0**15, growth_interval=2)

    def train_step(params, state, grads):
        grads = loss_scale.unscale(grads, state)
        grads_finite = kmp.all_finite(grads)
        state = loss_scale.next(state, grads_finite)
        params = kmp.select_tree(grads_finite, params - 0.5 * grads, params)
        return params, state

    params, state, step = ops.ones(2), loss_scale.init(), compiled(train_step, mode)
    scales = []
    for value in (1.0, np.inf, 1.0, 1.0, 1.0):
        scaled = ops.full((2,), value) * state.scale
        params, state = step(params, state, scaled)
        scales.append(float(ops.convert_to_numpy(state.scale)))
    assert scales == [2.0**15, 2.0**14, 2.0**14, 2.0**15, 2.0**15]
    assert ops.convert_to_numpy(params).tolist() == [-1.0, -1.0]  # four steps of five


def test_jmp_no_op_loss_scale():
    loss_scale = kmp.NoOpLossScale()
    state, loss, grads = loss_scale.init(), ops.ones(()), [ops.ones(2)]
    assert float(loss_scale.scale(loss, state)) == 1.0
    assert ops.convert_to_numpy(loss_scale.unscale(grads, state)[0]).tolist() == [1.0, 1.0]
    for finite in (True, False):
        state = loss_scale.next(state, ops.convert_to_tensor(finite))
        assert float(state.scale) == 1.0


# ---- NeurAI's documentation


def test_neurai_policies():
    policy = kmp.Policy("float32", "float16", "float32")  # param, compute, output
    params = {"w": np.ones((2, 2), "float32"), "step": np.int32(3)}
    compute = policy.cast_to_compute(params)
    assert compute["w"].dtype == "float16" and compute["step"].dtype == "int32"
    assert policy.cast_to_param(compute)["w"].dtype == "float32"
    assert policy.cast_to_output(compute)["w"].dtype == "float32"
    assert policy == kmp.get_policy("params=float32,compute=float16,output=float32")


# ---- PyTorch's automatic mixed precision examples


def net():
    kmp.set_policy("autocast")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    keras.config.set_dtype_policy("float32")
    return model


X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


@pytest.mark.only("tensorflow")
def test_pytorchs_typical_training_loop_on_tensorflow():
    import tensorflow as tf

    model, optimizer = net(), kmp.scaled("sgd", learning_rate=0.05)
    optimizer.build(model.trainable_variables)
    losses = []
    for _ in range(20):
        with tf.GradientTape() as tape:
            with kmp.autocast("mixed_float16"):
                output = model(X)
                assert dtype_of(output) == "float16"
            loss = ops.mean(ops.square(ops.cast(output, "float32") - Y))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.only("torch")
def test_pytorchs_typical_training_loop_on_torch():
    model, optimizer = net(), kmp.scaled("sgd", learning_rate=0.05)
    optimizer.build(model.trainable_variables)
    losses = []
    for _ in range(20):
        model.zero_grad()
        with kmp.autocast("mixed_float16"):
            output = model(X)
            assert dtype_of(output) == "float16"
        loss = ops.mean(ops.square(ops.cast(output, "float32") - ops.convert_to_tensor(Y)))
        optimizer.scale_loss(loss).backward()
        gradients = [v.value.grad for v in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.only("jax")
def test_pytorchs_typical_training_loop_on_jax():
    import jax

    model, optimizer = net(), kmp.scaled("sgd", learning_rate=0.05)
    optimizer.build(model.trainable_variables)
    weights = [v.value for v in model.trainable_variables]
    state = [v.value for v in optimizer.variables]

    def scaled_loss(weights, state):
        with kmp.autocast("mixed_float16"):
            output, _ = model.stateless_call(weights, [], X)
            assert dtype_of(output) == "float16"
        loss = ops.mean(ops.square(ops.cast(output, "float32") - Y))
        return optimizer.stateless_scale_loss(state, loss), loss

    @jax.jit
    def step(weights, state):
        (_, loss), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(weights, state)
        return (*optimizer.stateless_apply(state, gradients, weights), loss)

    losses = []
    for _ in range(20):
        weights, state, loss = step(weights, state)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_pytorchs_disabled_region():
    """A subregion in float32 inside an autocast region."""
    model = net()
    first, second = model.layers
    with kmp.autocast("mixed_bfloat16"):
        hidden = first(X)
        with kmp.autocast(enabled=False):
            output = second(kmp.cast_to_full(hidden))
    assert (dtype_of(hidden), dtype_of(output)) == ("bfloat16", "float32")


def test_pytorchs_decorated_forward():
    class Model(keras.Model):
        def __init__(self):
            super().__init__(dtype=kmp.Policy("autocast"))
            self.dense = keras.layers.Dense(2, dtype=kmp.Policy("autocast"))

        @kmp.autocast("mixed_bfloat16")
        def call(self, x):
            return self.dense(x)

    assert dtype_of(Model()(X)) == "bfloat16"


# ---- Genesis's guide


def test_genesis_global_switch():
    kmp.set_policy("mixed_bfloat16")
    model = keras.layers.Dense(10)
    x = np.random.default_rng(0).normal(size=(32, 784)).astype("float32")
    outputs = model(x)
    criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = criterion(np.zeros(32, "int32"), outputs)
    assert (x.dtype, dtype_of(outputs), dtype_of(loss)) == ("float32", "bfloat16", "float32")


def test_genesis_manual_control():
    kmp.set_policy("autocast")
    layers = [keras.layers.Dense(256), keras.layers.ReLU(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((784,)), *layers])
    x = np.ones((32, 784), "float32")
    with kmp.autocast():
        hidden = model.layers[0](x)
        activated = model.layers[1](hidden)
    outputs = model.layers[2](activated)
    half = kmp.half_dtype()
    assert [dtype_of(y) for y in (hidden, activated, outputs)] == [half, half, "float32"]


def test_genesis_half_and_float():
    half = kmp.cast_to_half(ops.ones(3))
    assert dtype_of(half) == kmp.half_dtype() and dtype_of(kmp.cast_to_full(half)) == "float32"


# ---- the guide itself


def test_the_optimizer_has_every_attribute_in_the_guide():
    optimizer = kmp.scaled("sgd")
    optimizer.build([keras.Variable([1.0])])
    named = re.findall(r"`(?:[a-z]+ = )?optimizer\.(\w+)", GUIDE.read_text().partition("## tf")[0])
    assert len(named) >= 5
    for name in named:
        assert hasattr(optimizer, name), name

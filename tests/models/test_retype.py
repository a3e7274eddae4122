"""Conversion to and from weights in half precision: the same model, weights and training state."""

import blocks
import keras
import ml_dtypes
import numpy as np
import pytest
from keras import layers, ops
from oracle import BACKEND, few

import kmp
from kmp._keras import layers_of, own_weights

pytestmark = pytest.mark.slow

BFLOAT16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 6)).astype("float32")
Y = (X @ RNG.normal(size=(6, 3))).argmax(1)

Adam = keras.optimizers.Adam
OPTIMIZERS = {
    "kmp": lambda: kmp.scaled(Adam(0.01), loss_scale="none"),
    "dynamic": lambda: kmp.scaled(Adam(0.01)),
    "masters": lambda: kmp.scaled(Adam(0.01), master_weights=True),
    "float32 slots": lambda: kmp.scaled(Adam(0.01), slot_dtype="float32"),
    "average": lambda: kmp.scaled(Adam(0.01, use_ema=True)),
    "accumulation": lambda: kmp.scaled(Adam(0.01, gradient_accumulation_steps=2)),
    "schedule": lambda: kmp.scaled(Adam(keras.optimizers.schedules.CosineDecay(0.01, 100))),
    "bare": lambda: Adam(0.01),
    "Keras's": lambda: keras.optimizers.LossScaleOptimizer(Adam(0.01)),
}


def model_of(optimizer="kmp", epochs=1):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", name="body"),
            layers.BatchNormalization(name="batch"),
            layers.Dense(8, "relu", name="more"),
            layers.LayerNormalization(name="norm"),
            layers.Dense(3, name="head"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, jit_compile=BACKEND == "jax")
    if epochs:
        fit(model, epochs)
    return model


def fit(model, epochs=1):
    """The losses. TensorFlow traces twice a step that builds its optimizer, hence not here."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def values(variables):
    return [ops.convert_to_numpy(ops.cast(v, "float32")) for v in variables]


def slots(model):
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return [v for v in inner.variables if not v.name.endswith("_remainder")]


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_becomes_half_and_what_stays():
    model = model_of()
    report = kmp.to_mixed_precision(model, "bfloat16")
    dtypes = {layer.name: {v.dtype for v in own_weights(layer)} for layer in model.layers}
    half, full = {"bfloat16"}, {"float32"}
    assert dtypes == {"body": half, "batch": full, "more": half, "norm": full, "head": full}
    assert {x.compute_dtype for x in model.layers[:-1]} == half
    assert {v.dtype for v in model.non_trainable_variables if "moving" in v.path} == full
    normalizes = "float32 weights: normalization"
    assert [row.reason for row in report.rows] == [
        "",
        "",
        normalizes,
        "",
        normalizes,
        "output layer",
    ]
    assert report.optimizer == "Adam was rebuilt for the dtypes of the weights, with its state."
    assert len(fit(model, 2)) == 2


@pytest.mark.parametrize("name", few(OPTIMIZERS, "kmp", "bare"))
def test_weights_and_training_state_are_rounded_once(name):
    model = model_of(name)
    weights, state = values(model.variables), values(slots(model))
    steps, learning_rate = int(model.optimizer.iterations), float(model.optimizer.learning_rate)
    kmp.to_mixed_precision(model, "bfloat16")
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    for after, before in ((model.variables, weights), (slots(model), state)):
        rounded = [
            x.astype(BFLOAT16) if v.dtype == "bfloat16" else x
            for v, x in zip(after, before, strict=True)
        ]
        assert_equal(values(after), [x.astype("float32") for x in rounded])
    by_weight = {v.dtype for v in slots(model) if v.name.endswith(("_momentum", "_velocity"))}
    assert by_weight == ({"float32"} if name == "float32 slots" else {"bfloat16", "float32"})
    assert int(model.optimizer.iterations) == steps and int(model.optimizer.steps) == 4
    assert float(model.optimizer.learning_rate) == learning_rate
    assert np.isfinite(fit(model)).all()
    assert int(model.optimizer.iterations) > steps


@pytest.mark.parametrize("name", few(["kmp", "masters", "bare"], "masters"))
def test_back_to_float32(name):
    model = model_of(name)
    there = values(model.trainable_variables)
    kmp.to_mixed_precision(model, "bfloat16")
    half = values(model.trainable_variables)
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert "rebuilt" in report.optimizer
    assert {v.dtype for v in model.weights} == {"float32"}
    assert {v.dtype for v in model.optimizer.inner_optimizer.variables} <= {
        "float32",
        "int32",
        "int64",
    }
    assert_equal(values(model.trainable_variables), there if name == "masters" else half)
    assert np.isfinite(fit(model)).all()


@pytest.mark.parametrize("name", ["kmp", "bare", "Keras's"])
def test_an_optimizer_that_is_not_built(name):
    model = model_of(name, epochs=0)
    kmp.to_mixed_precision(model, "bfloat16")
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer) and not model.optimizer.built
    before = values(model.trainable_variables)
    model.fit(X, Y, batch_size=16, verbose=0)  # which builds it
    assert all(
        np.any(a != b) for a, b in zip(before, values(model.trainable_variables), strict=True)
    )


def test_what_is_excluded_from_weight_decay_stays_so():
    model = model_of(epochs=0)
    inner = keras.optimizers.AdamW(0.0, weight_decay=100.0)
    inner.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["bias"])
    model.compile(kmp.scaled(inner, loss_scale="none"), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    kmp.to_mixed_precision(model, "bfloat16")
    model.optimizer.learning_rate = 0.001
    (body, bias), more = model.layers[0].weights, model.layers[2].kernel
    before = values([body, bias, more])
    zeros = [ops.zeros(v.shape) for v in model.trainable_variables]
    model.optimizer.apply(zeros, model.trainable_variables)
    moved = [bool(np.any(a != b)) for a, b in zip(before, values([body, bias, more]), strict=True)]
    assert moved == [False, False, True]


def test_a_multi_optimizer_is_built_anew():
    model = model_of(epochs=0)
    rest = keras.optimizers.SGD(0.1, momentum=0.9)
    heads = {model.layers[-1].path: Adam(0.01)}
    optimizer_map = keras.optimizers.OptimizerMap(rest, heads)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.MultiOptimizer(optimizer_map)
    model.compile(kmp.scaled(optimizer, loss_scale="none"), loss)
    fit(model)
    state = values(slots(model))
    kmp.to_mixed_precision(model, "bfloat16")
    for a, b in zip(values(slots(model)), state, strict=True):
        np.testing.assert_allclose(a, b, rtol=2.0**-8)
    assert np.isfinite(fit(model)).all()


def test_an_optimizer_that_cannot_be_made_anew_is_refused_before_anything_changes():
    model = model_of(epochs=0)
    rest, head = keras.optimizers.SGD(0.1, momentum=0.9), Adam(0.01)
    by_function = keras.optimizers.MultiOptimizer(lambda v: head if v.shape[-1] == 10 else rest)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kmp.scaled(by_function, loss_scale="none"), loss)
    fit(model)
    before = values(model.variables), values(slots(model))
    with pytest.raises(
        ValueError, match=r"(?s)made anew.*MultiOptimizer.*OptimizerMap instead, or"
    ):
        kmp.to_mixed_precision(model, "bfloat16")
    assert_equal(values(model.variables), before[0])
    assert_equal(values(slots(model)), before[1])
    assert np.isfinite(fit(model)).all()
    # What it says: a map, as in the test above, or before the model trains.
    model.compile(kmp.scaled(keras.optimizers.MultiOptimizer(lambda v: Adam(0.01))), loss)
    kmp.to_mixed_precision(model, "bfloat16")
    assert np.isfinite(fit(model)).all()


class OfTwo(keras.optimizers.SGD):
    """Its config lacks what its constructor needs."""

    def __init__(self, second, **arguments):
        super().__init__(0.1, **arguments)


class OfTwoWithConfig(OfTwo):
    def get_config(self):
        return {"second": 2.0}


def test_an_optimizer_without_a_sound_config_is_refused_before_anything_changes():
    model = model_of(epochs=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kmp.scaled(OfTwo(2.0), loss_scale="none"), loss)
    fit(model)
    before = values(model.variables)
    with pytest.raises(ValueError, match=r"(?s)made anew.*TypeError.*second.*Give it a get_config"):
        kmp.to_mixed_precision(model, "bfloat16")
    assert_equal(values(model.variables), before)
    assert np.isfinite(fit(model)).all()
    # What it says: a sound config, or before the model trains.
    model.compile(kmp.scaled(OfTwoWithConfig(2.0), loss_scale="none"), loss)
    fit(model)
    kmp.to_mixed_precision(model, "bfloat16")
    assert np.isfinite(fit(model)).all()
    model = model_of(epochs=0)
    model.compile(kmp.scaled(OfTwo(2.0), loss_scale="none"), loss)
    kmp.to_mixed_precision(model, "bfloat16")
    assert np.isfinite(fit(model)).all()


@pytest.mark.parametrize("name", few(["kmp", "masters", "dynamic"], "kmp"))
def test_a_file_goes_on_bit_for_bit(name, tmp_path):
    model = model_of(name)
    kmp.to_mixed_precision(model, "bfloat16")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert [v.dtype for v in loaded.variables] == [v.dtype for v in model.variables]
    slots_of = lambda m: m.optimizer.inner_optimizer.variables  # noqa: E731
    assert [v.dtype for v in slots_of(loaded)] == [v.dtype for v in slots_of(model)]
    assert fit(loaded) == fit(model)
    assert_equal(values(loaded.variables), values(model.variables))


@pytest.mark.parametrize("global_policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_blocks_that_make_their_layers_load_as_they_were(global_policy, tmp_path):
    inputs = keras.Input((6,))
    outputs = layers.Dense(2)(blocks.MakesInBuild()(blocks.Residual()(inputs)))
    model = keras.Model(inputs, outputs)
    kmp.to_mixed_precision(model, "bfloat16")
    dtypes = [v.dtype for v in model.weights]
    assert set(dtypes) == {"bfloat16", "float32"}
    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy(global_policy)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert [v.dtype for v in loaded.weights] == dtypes
    assert_equal(values(loaded.weights), values(model.weights))
    assert_equal([ops.convert_to_numpy(loaded(X))], [ops.convert_to_numpy(model(X))])


class HoldsLSTM(layers.Layer):
    """A block whose code makes a layer with orthogonal weights."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.lstm = layers.LSTM(4, name="lstm")

    def build(self, shape):
        self.lstm.build(shape)

    def call(self, x):
        return self.lstm(x)


@pytest.mark.quick
@pytest.mark.parametrize(
    "recurrent",
    [
        lambda: layers.LSTM(4),
        lambda: layers.Bidirectional(layers.GRU(4)),
        HoldsLSTM,
    ],
    ids=["lstm", "bidirectional", "block"],
)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_orthogonal_weights_in_half_precision_are_built_again(half, recurrent, tmp_path):
    """No backend draws them in half precision."""
    model = keras.Sequential([keras.Input((3, 2)), recurrent(), layers.Dense(1)])
    model.compile(kmp.scaled("sgd", master_weights=True), "mse")
    kmp.to_mixed_precision(model, half)
    x = RNG.normal(size=(4, 3, 2)).astype("float32")
    model.save(tmp_path / "model.keras")
    custom = {"HoldsLSTM": HoldsLSTM}
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom)
    assert [v.dtype for v in loaded.weights] == [v.dtype for v in model.weights]
    assert_equal(values([loaded(x)]), values([model(x)]))
    kmp.to_mixed_precision(loaded, "float32")
    assert {type(each).__name__ for each in orthogonal(loaded)} == {"Orthogonal"}
    twin = keras.models.clone_model(model)
    for weight in values(w for w in twin.weights if w.name == "recurrent_kernel"):
        np.testing.assert_allclose(weight @ weight.T, np.eye(4), atol=0.02)


def orthogonal(model):
    found = [x for layer in layers_of(model) for x in vars(layer).values()]
    return [x for x in found if isinstance(x, keras.initializers.Orthogonal)]


def test_a_conversion_that_fails_changes_no_bit():
    def filter_fn(layer, path):
        if layer.name == "head":
            raise RuntimeError("from filter_fn")
        return True

    model = model_of()
    before, optimizer = values(model.variables), model.optimizer
    with pytest.raises(RuntimeError, match="from filter_fn"):
        kmp.to_mixed_precision(model, "bfloat16", filter_fn)
    assert_equal(values(model.variables), before)
    assert model.optimizer is optimizer and {v.dtype for v in model.weights} == {"float32"}


class OfItsOwn(keras.Model):
    """Its code wants its first layer in float32."""

    def call(self, x):
        if keras.backend.standardize_dtype(self.layers[1](x).dtype) != "float32":
            raise TypeError("float32 is needed")
        return super().call(x)


def test_a_model_that_cannot_be_called_in_half_gets_every_bit_back():
    inputs = keras.Input((6,))
    x = layers.Dense(6)(inputs)
    model = OfItsOwn(inputs, layers.Dense(3)(x))
    model.compile(kmp.scaled(Adam(0.01), loss_scale="none"), "mse")
    x = X[:, :6]
    model.fit(x, x[:, :3], verbose=0)
    before, optimizer = values(model.variables), model.optimizer
    with pytest.raises(ValueError, match="cannot be called in bfloat16"):
        kmp.to_mixed_precision(model, "bfloat16")
    assert_equal(values(model.variables), before)
    assert model.optimizer is optimizer and {v.dtype for v in model.weights} == {"float32"}
    model.fit(x, x[:, :3], verbose=0)  # the optimizer still knows its variables


def test_layers_that_are_filtered_out_keep_their_weights():
    model = model_of()
    kmp.to_mixed_precision(model, "bfloat16", lambda layer, path: layer.name != "more")
    assert model.layers[0].kernel.dtype == "bfloat16" and model.layers[2].kernel.dtype == "float32"


def test_a_weight_whose_dtype_its_layer_chose_keeps_it():
    class Own(layers.Layer):
        def build(self, input_shape):
            self.chosen = self.add_weight(shape=(6,), dtype="float16", name="chosen")
            self.other = self.add_weight(shape=(6,), name="other")

        def call(self, x):
            return x * ops.cast(self.chosen, x.dtype) * self.other

    model = keras.Sequential([keras.Input((6,)), Own(), layers.Dense(2)])
    kmp.to_mixed_precision(model, "bfloat16")
    own = model.layers[0]
    assert (own.chosen.dtype, own.other.dtype) == ("float16", "bfloat16")
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert (own.chosen.dtype, own.other.dtype) == ("float16", "float32")


def lora_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", use_bias=False),
            layers.Dense(8, "relu", use_bias=False),
            layers.Dense(3),
        ]
    )
    for layer in model.layers[:2]:
        layer.enable_lora(2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kmp.scaled(Adam(0.01), loss_scale="none"), loss, jit_compile=BACKEND == "jax")
    return model


def test_lora_trains_float32_adapters_on_a_bfloat16_base(tmp_path):
    model = lora_model()
    kmp.to_mixed_precision(model, "bfloat16")
    body = model.layers[0]
    base, adapters = [body._kernel], [body.lora_kernel_a, body.lora_kernel_b]
    assert body._kernel.dtype == "bfloat16"
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    frozen, before = values(base), values(adapters)
    losses = fit(model, 20)
    assert losses[-1] < 0.8 * losses[0]
    assert_equal(values(base), frozen)
    assert all(np.any(a != b) for a, b in zip(before, values(adapters), strict=True))
    a, b = values(adapters)
    kmp.to_mixed_precision(model, "float32")
    model.save(
        tmp_path / "model.keras"
    )  # Keras merges adapters, in the dtype that layers compute in
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    (kernel,) = values([loaded.layers[0]._kernel])
    np.testing.assert_allclose(kernel, frozen[0] + a @ b, rtol=2.0**-20, atol=2.0**-24)
    kmp.to_mixed_precision(loaded, "bfloat16")
    body = loaded.layers[0]
    assert (body._kernel.dtype, body.lora_kernel_a.dtype) == ("bfloat16", "float32")
    assert fit(loaded, 2)[-1] < losses[0]


@pytest.mark.quick
def test_layers_that_were_frozen_in_the_conversion_train_when_they_are_not_any_more():
    """On TensorFlow a weight becomes another variable, which tapes watch if it is trainable."""
    model = model_of(epochs=0)
    body = model.get_layer("body")
    body.trainable = False
    kmp.to_mixed_precision(model, "bfloat16")
    assert not body.kernel.trainable
    body.trainable = True
    model.compile(kmp.scaled(Adam(0.1)), "mse")
    before = ops.convert_to_numpy(ops.cast(body.kernel, "float32"))
    model.fit(X, np.eye(3)[Y], verbose=0)
    after = ops.convert_to_numpy(ops.cast(body.kernel, "float32"))
    assert (after != before).mean() > 0.5

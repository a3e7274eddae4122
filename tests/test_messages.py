"""docs/messages/: each message is produced without kmp, and the page's own code removes it."""

import pathlib
import re
import types

import keras
import numpy as np
import pytest
from keras import ops
from oracle import BACKEND

import kmp

pytestmark = pytest.mark.usefixtures("quick_weights")

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "messages"
PAGES = {path.stem: path.read_text() for path in FOLDER.glob("*.md") if path.stem != "index"}
INDEX = (FOLDER / "index.md").read_text()

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 8)).astype("float32")
Y = X[:, :1]


def code_of(page):
    return re.findall(r"^```python\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


def cure(page, block=0, **names):
    """Run a block of a page beside what its reader has; all names that there are then."""
    namespace = {"keras": keras, **names}
    exec(compile(code_of(page)[block], f"{page}.md", "exec"), namespace)
    return types.SimpleNamespace(**namespace)


def numbers(variable):
    return ops.convert_to_numpy(ops.cast(variable, "float32"))


def small(*layers, policy="float32", inputs=8, **arguments):
    """A model of these layers under a policy."""
    keras.config.set_dtype_policy(policy)
    made = [layer() for layer in layers] or [keras.layers.Dense(1, **arguments)]
    return keras.Sequential([keras.Input((inputs,)), *made])


def moved(model, x=X, y=Y, **arguments):
    """Whether an epoch changes the first weight."""
    before = numbers(model.weights[0])
    model.fit(x, y, verbose=0, **arguments)
    return bool((numbers(model.weights[0]) != before).any())


def finite(x):
    return bool(np.isfinite(np.asarray(x)).all())


# The pages


@pytest.mark.any_backend
@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_its_parts(page):
    title, _, text = PAGES[page].partition("\n")
    assert title.startswith("# ") and code_of(page)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings in (["Otherwise"], ["Otherwise", "Asked as"])
    assert f"| [{title[2:]}]({page}.md) |" in INDEX
    assert f'("{page}"' in pathlib.Path(__file__).read_text(), "no test runs its code"


@pytest.mark.any_backend
def test_the_index_has_each_page_once():
    assert sorted(re.findall(r"\]\((\w+)\.md\) \|", INDEX)) == sorted(PAGES)


# Stands still


def test_the_loss_is_constant_in_bfloat16():
    model = small(policy="bfloat16")
    model.compile("adam", "mse")
    losses = model.fit(X, Y, epochs=3, shuffle=False, verbose=0).history["loss"]
    assert len(set(losses)) == 1
    cure("loss_constant_in_bfloat16", model=model)
    assert moved(model)


def test_it_works_in_float32_and_not_in_bfloat16():
    target = 0.9 * X.sum(axis=1, keepdims=True)

    def weights(policy, optimizer=None):
        model = small(policy=policy, kernel_initializer="ones", use_bias=False)
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        if optimizer:
            optimizer(model)
        model.fit(X, target, batch_size=4, epochs=8, verbose=0)
        return numbers(model.weights[0])

    assert (weights("float32") != 1).all()
    assert (weights("bfloat16") == 1).all()
    cured = weights("bfloat16", lambda model: cure("works_in_float32_not_in_bfloat16", model=model))
    assert cured.mean() < 1


def loss_of(model):
    """Far smaller than what float16 can hold the gradients of."""
    return ops.mean(ops.cast(model(ops.ones((1, 8))), "float32")) * 1e-8


def plain_gradients(model):
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of(model)
        return tape.gradient(loss, model.trainable_variables)
    loss_of(model).backward()
    return [v.value.grad for v in model.trainable_variables]


def in_a_loop(page, model):
    """Run the block of a page that is about this backend."""
    if BACKEND == "tensorflow":
        import tensorflow

        return cure(page, model=model, loss_of=loss_of, tf=tensorflow)
    return cure(page, block=1, model=model, loss_of=loss_of)


@pytest.mark.only("tensorflow", "torch")
def test_all_gradients_are_zero():
    model = small(policy="mixed_float16", use_bias=False)
    assert not numbers(plain_gradients(model)[0]).any()
    before = numbers(model.weights[0])
    in_a_loop("gradients_are_zero", model)
    assert (numbers(model.weights[0]) != before).all()


@keras.saving.register_keras_serializable(package="messages")
class Norm(keras.layers.Layer):
    def call(self, x):
        return ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))


@pytest.mark.slow
def test_the_loss_scale_falls():
    model = small(lambda: keras.layers.Dense(4, use_bias=False), lambda: Norm(name="norm"))
    x = np.tile(np.stack([0 * X[0], X[1]]), (20, 1))  # every other row is padding
    y = np.ones((40, 1))
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(x, y, batch_size=1, verbose=0)
    assert float(model.optimizer.dynamic_scale) == 2.0**-5
    assert "norm" in str(kmp.debug.locate_nonfinite(model, x, y))
    cure("loss_scale_falls", block=2, model=model)
    assert moved(model, x, y, batch_size=1)
    assert float(model.optimizer.dynamic_scale) == 1.0


@pytest.mark.slow
def test_the_loss_scale_has_to_fall_below_1(capsys):
    """At a scale of 1, where tf.keras 2 stops, the step is skipped."""
    model = small(policy="mixed_float16", kernel_initializer="zeros", use_bias=False)
    x, y = np.full((40, 8), 200), np.full((40, 1), 1e4)
    at_1 = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=1.0)
    model.compile(at_1, "mse")
    assert not moved(model, x[:1], y[:1])
    cure("loss_scale_falls", model=model, x=x, y=y)
    assert "loss scale of at most" in capsys.readouterr().out
    cure("loss_scale_falls", block=1, model=model)
    assert moved(model, x, y, batch_size=1)
    assert float(model.optimizer.dynamic_scale) < 1


@pytest.mark.parametrize("dtype, stop", [("bfloat16", 256), ("float16", 2048)])
def test_a_sum_stops(dtype, stop):
    def after(metric):
        metric.update_state([float(stop)])
        metric.update_state([1.0])
        return float(metric.result())

    assert after(keras.metrics.Sum(dtype=dtype)) == stop
    assert after(cure("metric_stops_at_256").metric) == stop + 1


# NaN, inf or blank


def too_large(policy="float32"):
    """A model whose second layer leaves float16, as those do that were trained in bfloat16."""
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    large = keras.initializers.RandomNormal(stddev=3e5)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(16, 8),
            keras.layers.Dense(8, kernel_initializer=large, name="up"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(16),
        ]
    )
    keras.config.set_dtype_policy("float32")
    return model


TOKENS = RANDOM.integers(0, 16, (2, 4))


def test_blank_output():
    right = too_large().predict(TOKENS, verbose=0).argmax(-1)
    blank = too_large("mixed_float16").predict(TOKENS, verbose=0)
    assert np.isnan(blank).all() and not blank.argmax(-1).any()
    model = too_large()
    cure("blank_output_in_float16", model=model, x=TOKENS)
    np.testing.assert_array_equal(model.predict(TOKENS, verbose=0).argmax(-1), right)
    assert [layer.compute_dtype for layer in model.layers].count("float32") == 2  # the head, too


@pytest.mark.slow
def test_loss_nan():
    model = small(
        lambda: keras.layers.Dense(8, kernel_initializer="ones", name="up"),
        keras.layers.LayerNormalization,
        lambda: keras.layers.Dense(1),
        policy="mixed_float16",
    )
    model.compile("adam", "mse")
    x = np.full_like(X, 2e4)
    assert np.isnan(model.fit(x, Y, verbose=0).history["loss"]).all()
    cure("loss_nan_in_float16", model=model, x=x, y=Y)
    assert finite(model.evaluate(x, Y, verbose=0))
    assert moved(model, x)


ONE_BAD = np.concatenate([X[:8], np.full_like(X[:8], np.nan)])


def test_loss_nan_from_one_batch():
    model = small()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    first = model.fit(ONE_BAD, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
    assert np.isnan(first).all() and finite(numbers(model.weights[0]))
    cure("loss_nan_from_one_batch", model=model)
    assert finite(model.fit(ONE_BAD, Y, batch_size=8, shuffle=False, verbose=0).history["loss"])


@pytest.mark.slow
def test_epsilon_is_zero():
    assert np.float16(1e-8) == 0

    def after(compile_it):
        model = small(policy="float16", kernel_initializer="zeros")
        compile_it(model)
        model.fit(X / 100, Y / 100, verbose=0)
        return numbers(model.weights[0])

    def plain(model):
        model.compile(keras.optimizers.Adam(epsilon=1e-8), "mse")

    assert not finite(after(plain))
    assert finite(after(lambda model: cure("epsilon_is_zero", model=model)))


@pytest.mark.only("tensorflow", "jax")  # PyTorch's CPUs compute the product in float32 first
def test_the_mask_is_inf():
    scores = ops.convert_to_tensor(np.float16([[1, 2, 3]]))
    mask = ops.convert_to_tensor(np.float16([[1, 1, 0]]))
    assert np.isnan(numbers(ops.softmax(scores + (1 - mask) * -1e9))[0, :2]).all()  # of the words
    keras.config.set_dtype_policy("float16")
    weights = numbers(cure("mask_is_inf", scores=scores, mask=ops.cast(mask, "bool")).weights)
    np.testing.assert_allclose(weights, [[0.2689, 0.7311, 0]], atol=2**-11)


@pytest.mark.slow
def test_softmax_and_crossentropy():
    def biases(shape, dtype):
        return ops.cast(np.float32([-13] + 9 * [0]), dtype)

    def head():
        return keras.layers.Dense(10, activation="softmax", bias_initializer=biases)

    y = np.zeros(16)  # of a class whose probability is 2.5e-7
    model = small(head, policy="mixed_float16")
    probabilities = ops.convert_to_tensor(np.float16([[0, 1]]))
    loss = keras.losses.SparseCategoricalCrossentropy()
    assert abs(float(loss(np.zeros(1), probabilities)) - 16.118) < 1e-3
    assert np.isinf(numbers(-ops.log(probabilities))[0, 0])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), loss)
    assert not moved(model, X, y)  # the gradient is inf: skipped
    model = small(keras.layers.Flatten, policy="mixed_float16")
    cure("softmax_crossentropy_in_float16", model=model)
    model.layers[-1].bias.assign(biases((10,), "float32"))
    assert moved(model, X, y)


@pytest.mark.slow
def test_moving_statistics_are_nan():
    x = np.concatenate([X[:8], np.full_like(X[:8], 1e6)])  # inf in float16

    def layers():
        return small(
            keras.layers.BatchNormalization, lambda: keras.layers.Dense(1), policy="mixed_float16"
        )

    model = layers()
    model.compile("adam", "mse")
    model.fit(x, Y, batch_size=8, shuffle=False, verbose=0)
    assert finite(numbers(model.trainable_variables[-1]))
    assert not finite(numbers(model.layers[0].moving_mean))
    assert not finite(model.evaluate(X, Y, verbose=0))
    model = layers()
    cure("batchnorm_nan", model=model)
    model.fit(x, Y, batch_size=8, shuffle=False, verbose=0)
    assert finite(numbers(model.layers[0].moving_mean))
    assert finite(model.evaluate(X, Y, verbose=0))


def test_invalid_loss(capsys):
    model = small()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    stop = keras.callbacks.TerminateOnNaN()
    ended = model.fit(
        ONE_BAD, Y, batch_size=8, shuffle=False, epochs=2, verbose=0, callbacks=[stop]
    )
    assert len(ended.epoch) == 1
    assert "Batch 1: Invalid loss, terminating training" in capsys.readouterr().out
    cure("invalid_loss_terminating_training", model=model, x=ONE_BAD, y=Y)
    assert len(model.history.epoch) == 2
    assert "Invalid loss" not in capsys.readouterr().out


# An error


def test_no_get_scaled_loss():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    for name in ("get_scaled_loss", "get_unscaled_gradients"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(optimizer, name)(1.0)
    if BACKEND == "jax":
        return  # the page points to the loop of JAX
    model = small(use_bias=False, kernel_initializer="ones")
    in_a_loop("get_scaled_loss", model)
    np.testing.assert_allclose(numbers(model.weights[0]), 1 - 0.5 * 1e-8, rtol=2**-23)


def test_dynamic_is_no_argument():
    plain = keras.optimizers.LossScaleOptimizer
    with pytest.raises(ValueError, match="no longer supports `dynamic=False`"):
        plain(keras.optimizers.Adam(), dynamic=False, initial_scale=1024)
    optimizer = cure("no_longer_supports_dynamic").optimizer
    optimizer.build([keras.Variable([1.0])])
    assert float(optimizer.scale_loss(1.0)) == 1024


def test_a_name_is_no_optimizer():
    with pytest.raises(AttributeError, match="'str' object has no attribute 'loss_scale_factor'"):
        keras.optimizers.LossScaleOptimizer("adam")
    assert isinstance(cure("optimizer_by_name").optimizer.inner_optimizer, keras.optimizers.Adam)


def test_an_lstm_in_bfloat16():
    says = {
        "tensorflow": "Value for attr 'T' of bfloat16 is not in the list of allowed values",
        "jax": "Unsupported dtype bfloat16",
        "torch": "\"geqrf_cpu\" not implemented for 'BFloat16'",
    }[BACKEND]
    with pytest.raises(Exception, match=re.escape(says)):
        keras.layers.LSTM(4, dtype="bfloat16").build((None, 3, 2))
    page = PAGES["lstm_in_bfloat16"].replace("\n", " ")
    assert says in page
    model = cure("lstm_in_bfloat16").model
    assert model.layers[0].compute_dtype == model.layers[0].cell.kernel.dtype == "bfloat16"
    assert finite(numbers(model.layers[0].cell.recurrent_kernel))


def test_set_floatx():
    def total():
        metric = keras.metrics.Sum()
        metric.update_state([256.0])
        metric.update_state([1.0])
        return float(metric.result())

    keras.config.set_floatx("bfloat16")
    try:
        assert (keras.backend.result_type("int32", float), total()) == ("float16", 256)
        cure("set_floatx")
        assert (keras.backend.result_type("int32", float), total()) == ("float32", 257)
        layer = keras.layers.Dense(1)
        layer.build((None, 8))
        assert (layer.compute_dtype, layer.kernel.dtype) == ("bfloat16", "float32")
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.slow
def test_quantization_aware_training():
    """The message is that of a package which is not run here."""
    if not hasattr(keras.quantizers, "QuantizationConfig"):
        pytest.skip("to_int8 needs Keras 3.13")
    model = small(lambda: keras.layers.Dense(4, activation="relu"), lambda: keras.layers.Dense(1))
    cure("quantization_aware_training", model=model, x=X, y=Y)
    assert {layer.kernel.dtype for layer in model.layers} == {"int8"}


def test_gradients_in_trackers(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'write_grads'"):
        keras.callbacks.TensorBoard(tmp_path, write_grads=True)
    model, reports = small(), []
    wandb = types.SimpleNamespace(log=reports.append)
    cure("gradients_in_wandb", model=model, x=X, y=Y, wandb=wandb)
    assert any("norm" in name and "kernel" in name for name in reports[-1])


# Too large, too slow, or not what was asked for


def test_out_of_memory():
    """Counted: the bytes of weights and slots, not run out of."""

    def bytes_a_parameter(model):
        model.optimizer.build(model.trainable_variables)
        kept = [x for x in (*model.variables, *model.optimizer.variables) if len(x.shape)]
        bits = [np.prod(x.shape) * int(re.search(r"\d+$", x.dtype)[0]) for x in kept]
        return sum(bits) / 8 / model.count_params()

    model = small(
        lambda: keras.layers.Dense(512), lambda: keras.layers.Dense(1, use_bias=False), inputs=512
    )
    model.compile("adamw", "mse")
    assert bytes_a_parameter(model) == 12
    cure("out_of_memory", model=model)
    assert 5.1 < bytes_a_parameter(model) < 5.2


def test_slower_than_float32(capsys):
    """Counted: the sizes that tensor cores do not like. Nothing is timed."""
    for size, found in ((1001, True), (1008, False)):
        model = small(lambda size=size: keras.layers.Dense(size), policy="mixed_float16", inputs=64)
        cure("slower_than_float32", model=model)
        assert ("multiple of 8" in capsys.readouterr().out) == found


def test_ids_are_rounded():
    ids = np.float32([[2047], [2048], [2049], [2051]])

    def rest(inputs):
        rows = keras.layers.Embedding(4096, 1, embeddings_initializer=count, dtype="float32")
        return rows(keras.layers.Reshape((1,))(inputs))

    def count(shape, dtype):
        return ops.reshape(ops.arange(shape[0], dtype=dtype), shape)

    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((1,))
    seen = keras.Model(inputs, rest(inputs)).predict(ids, verbose=0)
    assert seen.ravel().tolist() == [2047, 2048, 2048, 2052]
    model = cure("ids_above_2048", rest_of_the_model=rest).model
    assert (model.predict(ids.astype("int32"), verbose=0).ravel() == ids.ravel()).all()


def test_saved_in_another_policy(tmp_path):
    path = tmp_path / "model.keras"
    model = small(
        lambda: keras.layers.Dense(4), lambda: keras.layers.Dense(1), policy="mixed_float16"
    )
    model.save(path)
    keras.config.set_dtype_policy("float32")
    plain = keras.models.load_model(path)
    assert {layer.compute_dtype for layer in plain.layers} == {"float16"}
    cured = cure("saved_in_another_policy", path=path).model
    assert {layer.compute_dtype for layer in cured.layers} == {"float32"}
    for weight, there in zip(cured.weights, model.weights, strict=True):
        np.testing.assert_array_equal(numbers(weight), numbers(there))

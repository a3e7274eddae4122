"""The scope: which layers follow it, when, and in which thread."""

import threading

import keras
import numpy as np
import pytest
from keras import ops
from oracle import COMPILED_MODES, compiled

import kmp

HALF = kmp.half_dtype()
X = np.ones((2, 3), "float32")


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


@pytest.fixture
def dense():
    layer = keras.layers.Dense(4, dtype=kmp.Policy("autocast"))
    layer.build((None, 3))
    return layer


def test_a_layer_computes_in_half_exactly_while_a_scope_is_open(dense):
    assert dtype_of(dense(X)) == "float32"
    with kmp.autocast():
        assert dtype_of(dense(X)) == HALF
        assert dense.dtype_policy.output_dtype == HALF
    assert dtype_of(dense(X)) == "float32"
    assert dense.kernel.dtype == "float32"


def test_what_leaves_the_scope_goes_on_in_float32():
    """Genesis's manual control: two layers inside, one outside."""
    kmp.set_policy("autocast")
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.ReLU(), keras.layers.Dense(1)]
    )
    with kmp.autocast():
        hidden = model.layers[0](X)
        activated = model.layers[1](hidden)
    outputs = model.layers[2](activated)
    assert [dtype_of(x) for x in (hidden, activated, outputs)] == [HALF, HALF, "float32"]


@pytest.mark.parametrize("name", ["mixed_float16", "float16", "p=f32,c=f16,o=f32"])
def test_the_scope_names_the_compute_dtype(dense, name):
    with kmp.autocast(name):
        assert dtype_of(dense(X)) == "float16"


def test_scopes_nest_and_the_inner_one_rules(dense):
    with kmp.autocast("mixed_bfloat16"):
        with kmp.autocast("mixed_float16"):
            assert dtype_of(dense(X)) == "float16"
            with kmp.autocast(enabled=False):
                assert dtype_of(dense(X)) == "float32"
            assert dtype_of(dense(X)) == "float16"
        assert dtype_of(dense(X)) == "bfloat16"
    assert dtype_of(dense(X)) == "float32"


def test_one_scope_may_be_opened_again_and_again(dense):
    scope = kmp.autocast("mixed_float16")
    for _ in range(2):
        with scope, scope:
            assert dtype_of(dense(X)) == "float16"
        assert dtype_of(dense(X)) == "float32"
        assert keras.config.dtype_policy().name == "float32"


def test_an_exception_closes_the_scope(dense):
    with pytest.raises(RuntimeError, match="from inside"), kmp.autocast(), kmp.autocast():
        raise RuntimeError("from inside")
    assert dtype_of(dense(X)) == "float32"
    assert keras.config.dtype_policy().name == "float32"


def test_layers_built_inside_take_the_policy_for_good():
    with kmp.autocast("mixed_bfloat16"):
        inside = keras.layers.Dense(2)
        with kmp.autocast(enabled=False):
            disabled = keras.layers.Dense(2)
    outside = keras.layers.Dense(2)
    assert [x.compute_dtype for x in (inside, disabled, outside)] == [
        "bfloat16",
        "float32",
        "float32",
    ]
    assert dtype_of(inside(X)) == "bfloat16"


def test_under_a_global_autocast_layers_built_inside_follow_the_scope():
    kmp.set_policy("autocast")
    with kmp.autocast("mixed_bfloat16"):
        layer = keras.layers.Dense(2)
        assert dtype_of(layer(X)) == "bfloat16"
    assert dtype_of(layer(X)) == "float32"
    assert kmp.get_policy() == kmp.Policy("autocast")


def test_disabled_is_as_if_no_scope_were_open():
    kmp.set_policy("mixed_float16")
    with kmp.autocast("mixed_bfloat16"), kmp.autocast("mixed_bfloat16", enabled=False):
        assert keras.layers.Dense(1).compute_dtype == "float16"
    assert keras.config.dtype_policy().name == "mixed_float16"


def test_each_thread_has_scopes_of_its_own(dense):
    seen = {}
    opened, looked = threading.Event(), threading.Event()

    def other():
        opened.wait()
        seen["outside"] = dense.compute_dtype
        with kmp.autocast("mixed_float16"):
            seen["inside"] = dense.compute_dtype
            seen["built"] = keras.layers.ReLU().compute_dtype
            looked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with kmp.autocast("mixed_bfloat16"):
        opened.set()
        looked.wait()
        assert dense.compute_dtype == "bfloat16"
    thread.join()
    assert seen == {"outside": "float32", "inside": "float16", "built": "float16"}


@pytest.mark.parametrize("decorator", [kmp.autocast, kmp.autocast()], ids=["bare", "called"])
def test_a_decorated_function_computes_in_half(decorator, dense):
    @decorator
    def function(x, *, ids, scale):
        """The docstring."""
        assert dtype_of(x) == HALF and ids.dtype == "int64" and scale == 2.0
        return {"y": dense(x) * scale, "ids": ids}

    done = function(X, ids=np.arange(2), scale=2.0)
    assert dtype_of(done["y"]) == HALF and done["ids"].dtype == "int64"
    assert function.__name__ == "function" and function.__doc__ == "The docstring."
    assert dense.compute_dtype == "float32"


def test_a_decorated_function_returns_in_the_output_dtype():
    @kmp.autocast("p=f32,c=f16,o=f32")
    def square(x):
        return dtype_of(x), x * x

    inside, y = square(ops.convert_to_tensor(X) * 300)
    assert (inside, dtype_of(y)) == ("float16", "float32")
    assert np.isinf(ops.convert_to_numpy(y)).all()  # it was computed in float16

    assert dtype_of(kmp.autocast(enabled=False)(lambda x: x)(X)) == "float32"


@pytest.mark.parametrize("base", [object, keras.layers.Layer])  # a layer has a dtype of its own
def test_a_decorated_method_and_an_exception(dense, base):
    class Model(base):
        @kmp.autocast("mixed_float16")
        def predict(self, x):
            if x is None:
                raise ValueError("no input")
            return dense(x)

    assert dtype_of(Model().predict(X)) == "float16"
    with pytest.raises(ValueError, match="no input"):
        Model().predict(None)
    assert dense.compute_dtype == "float32"


@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_a_scope_inside_a_compiled_function(mode, dense):
    def function(x):
        with kmp.autocast("mixed_bfloat16"):
            hidden = dense(x)
        return hidden, dense(x)

    inside, outside = compiled(function, mode)(ops.convert_to_tensor(X))
    assert (dtype_of(inside), dtype_of(outside)) == ("bfloat16", "float32")


@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_a_compiled_function_keeps_the_dtypes_of_its_first_call(mode, dense):
    function = compiled(lambda x: dense(x), mode)
    x = ops.convert_to_tensor(X)
    with kmp.autocast("mixed_bfloat16"):
        assert dtype_of(function(x)) == "bfloat16"
    assert dtype_of(function(x)) == "bfloat16"
    assert dtype_of(compiled(lambda x: dense(x), mode)(x)) == "float32"


def test_predict_keeps_the_dtypes_of_its_first_call():
    """As documented; a new function is traced once the old one is dropped."""
    from kmp._keras import forget_functions

    kmp.set_policy("autocast")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    assert model.predict(X, verbose=0).dtype == "float32"
    with kmp.autocast("mixed_float16"):
        if keras.backend.backend() != "torch":  # which traces nothing
            assert model.predict(X, verbose=0).dtype == "float32"
        forget_functions(model)
        assert model.predict(X, verbose=0).dtype == "float16"


def test_a_scope_cannot_be_the_policy_that_follows_scopes():
    with pytest.raises(ValueError, match=r'says which dtype to compute in. Received: "autocast"'):
        kmp.autocast("autocast")
    with pytest.raises(ValueError, match="A policy's dtypes are"):
        kmp.autocast("halff")
    assert keras.config.dtype_policy().name == "float32"


def test_training_in_a_scope():
    """PyTorch's recipe, in the words of Keras: the whole `fit` in a scope, with loss scaling."""
    kmp.set_policy("autocast")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", learning_rate=0.01), "mse")
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    with kmp.autocast("mixed_bfloat16"):
        losses = model.fit(x, x[:, :1], epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert {v.dtype for v in model.trainable_variables} == {"float32"}


def test_a_model_saved_under_autocast_follows_scopes_again(tmp_path):
    kmp.set_policy("autocast")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    layer = keras.models.load_model(tmp_path / "model.keras").layers[0]
    assert layer.dtype_policy == kmp.Policy("autocast") and layer.compute_dtype == "float32"
    with kmp.autocast("mixed_float16"):
        assert layer.compute_dtype == "float16"

"""State that a checkpoint brought in part is named at the first step, and nothing else is.

`set_state_tree` is what Keras calls with what it has read from an Orbax checkpoint.
"""

import re

import keras
import numpy as np
import pytest
from keras import ops
from older import of_keras

import kmp

X = np.random.default_rng(3).normal(size=(8, 4)).astype("float32")
Y = X[:, :1] * 2


def make_model(names=("first", "second"), optimizer=None):
    x = keras.Input((4,))
    hidden = keras.layers.Dense(3, name=names[0])(x)
    model = keras.Model(x, keras.layers.Dense(1, name=names[1])(hidden), name="model")
    compile(model, optimizer or kmp.scaled("adam", learning_rate=0.1))
    return model


def compile(model, optimizer, loss="mse"):
    """Eagerly, which is quick; what is compiled reads the state in other places, see below."""
    model.compile(optimizer, loss, run_eagerly=True)


def train(model, steps=2):
    for _ in range(steps):
        model.train_on_batch(X, Y)
    return model


def ours(said):
    return sum(issubclass(x.category, kmp.PrecisionWarning) for x in said)


def tree_of(model):
    return model.get_state_tree(value_format="numpy_array")


def build(model):
    model.optimizer.build(model.trainable_variables)
    return model


def numbers(model):
    return [ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]


def test_a_second_model_in_the_same_process_gets_all_of_it():
    saved = train(make_model())
    restored = build(make_model())
    restored.set_state_tree(tree_of(saved))
    for expected, received in zip(numbers(saved), numbers(restored), strict=True):
        np.testing.assert_array_equal(received, expected)
    train(restored)  # says nothing


@pytest.mark.parametrize("measures", [True, False])
def test_layers_with_other_names(measures):
    saved = train(make_model())
    restored = build(make_model(("one", "two"), optimizer=scaled(measures)))
    restored.set_state_tree(tree_of(saved))
    with pytest.warns(
        kmp.PrecisionWarning, match=r"2 steps were applied, but the slots of 4 of 4 .* 'one/kernel'"
    ) as said:
        train(restored)
    assert ours(said) == 1
    train(restored)


def scaled(measures):
    inner = keras.optimizers.Adam(0.1, name="adam")
    return kmp.LossScaleOptimizer(inner, measure_gradients=measures)


def test_one_layer_with_another_name():
    restored = build(make_model(("first", "two")))
    restored.set_state_tree(tree_of(train(make_model())))
    with pytest.warns(kmp.PrecisionWarning, match="2 of 4 weights are as new: 'two/kernel', 'two/"):
        train(restored)


def test_a_sequential_model_without_its_prefix():
    """As keras.models.load_model(directory) builds it; see keras#23251."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="only")])
    compile(model, kmp.scaled("adam"))
    loaded = keras.Sequential.from_config(model.get_config())
    if model.weights[0].path == loaded.weights[0].path:
        pytest.skip("this Keras, 3.16 or newer, gives the layers their prefix")
    compile(loaded, kmp.scaled("adam"))
    build(loaded).set_state_tree(tree_of(train(model)))
    with pytest.warns(kmp.PrecisionWarning, match="write load_weights"):
        train(loaded)


def unnamed():
    """A model whose layers Keras numbers."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    compile(model, kmp.scaled("adam", learning_rate=0.1))
    return model


@pytest.mark.slow
def test_who_follows_the_advice_has_the_whole_state():
    keras.utils.clear_session(free_memory=False)
    saved = train(unnamed())
    for make, advised in (
        (lambda: build(unnamed()), "call keras.utils.clear_session() before you make them"),
        (unnamed, "build(model.trainable_variables) before model.load_weights"),
    ):
        restored = make()
        restored.set_state_tree(tree_of(saved))
        with pytest.warns(kmp.PrecisionWarning, match=re.escape(advised)):
            train(restored)
        keras.utils.clear_session(free_memory=False)
        restored = build(unnamed())
        restored.set_state_tree(tree_of(saved))
        for expected, received in zip(numbers(saved), numbers(restored), strict=True):
            np.testing.assert_array_equal(received, expected)
        train(restored)


def test_restored_before_the_optimizer_is_built():
    restored = make_model()
    restored.set_state_tree(tree_of(train(make_model())))
    with pytest.warns(kmp.PrecisionWarning, match="its 2 steps came before it was built") as said:
        train(restored)
    assert ours(said) == 1


@pytest.mark.parametrize("file", ["model.weights.h5", "model.keras"])
def test_a_file_that_is_loaded_before_the_optimizer_is_built(tmp_path, file):
    saved = train(make_model())
    (saved.save if file.endswith(".keras") else saved.save_weights)(tmp_path / file)
    restored = make_model()
    with pytest.warns(UserWarning) as said:
        restored.load_weights(tmp_path / file)
    kmps, keras_of_the_inner = [str(x.message) for x in said]
    assert "is not built yet. To go on from it, write model.optimizer.build(" in kmps
    assert "Skipping variable loading" in keras_of_the_inner
    train(restored)


def fresh_weights(model, saved):
    model.set_weights(saved.get_weights())


def restored_weights(model, saved):
    tree = tree_of(saved)
    del tree["optimizer_variables"]
    model.set_state_tree(tree)


def later_schedule(model, saved):
    model.optimizer.iterations.assign(1000)


def by_place(model, saved):
    """Under other names, as a loop's own checkpoint does."""
    for variable, value in zip(model.optimizer.variables, numbers(saved)[4:], strict=True):
        variable.assign(value)


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("prepare", [fresh_weights, restored_weights, later_schedule, by_place])
def test_nothing_is_said_of_what_is_meant(prepare, is_built):
    saved, model = train(make_model()), make_model(("one", "two"))
    if is_built or prepare is by_place:
        build(model)
    prepare(model, saved)
    train(model)


@pytest.mark.parametrize(
    "optimizer, arguments",
    [
        ("sgd", {}),
        ("sgd", {"gradient_accumulation_steps": 2}),  # the window is empty after 2 steps
        ("adam", {"use_ema": True}),
        ("adagrad", {}),
        ("lion", {}),
    ],
    ids=str,
)
def test_nothing_is_said_of_a_whole_state(optimizer, arguments):
    def made():
        return make_model(optimizer=kmp.scaled(optimizer, learning_rate=0.1, **arguments))

    restored = build(made())
    restored.set_state_tree(tree_of(train(made())))
    train(restored)


def test_nothing_is_said_of_one_of_several_optimizers_whose_window_is_empty():
    def made():
        sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        several = of_keras("optimizers.MultiOptimizer")(lambda v: sgd)
        return make_model(optimizer=kmp.scaled(several))

    restored = build(made())
    restored.set_state_tree(tree_of(train(made())))
    train(restored)


def test_nothing_is_said_of_a_layer_that_never_had_a_gradient():
    def made():
        model = make_model()
        model.get_layer("second").kernel.assign(np.zeros((3, 1)))
        return model

    def never(y_true, y_pred):  # reaches the last bias alone
        return ops.sum(y_true, axis=-1) + ops.sum(y_pred, axis=-1) * 0

    saved, restored = made(), build(made())
    for model in (saved, restored):
        compile(model, kmp.scaled("adam"), never)
    train(saved)
    build(restored).set_state_tree(tree_of(saved))
    train(restored)


@pytest.mark.parametrize("measures", [True, False])
def test_nothing_is_said_where_no_step_was_applied(measures):
    saved = make_model(optimizer=scaled(measures))
    saved.train_on_batch(np.full_like(X, np.inf), Y)
    assert int(saved.optimizer.steps) == int(saved.optimizer.skipped_steps) == 1
    restored = build(make_model(("one", "two"), optimizer=scaled(measures)))
    restored.set_state_tree(tree_of(saved))
    train(restored)


def renamed():
    """A model of which only the counters were restored, to be compiled."""
    restored = make_model(("one", "two"))
    restored.compile(restored.optimizer, "mse")
    build(restored).set_state_tree(tree_of(train(make_model())))
    return restored


@pytest.mark.only("tensorflow")
def test_under_a_strategy_in_fit():
    from replicas import mirrored

    saved = train(make_model())
    with mirrored(2).scope():
        restored = build(make_model(("one", "two")))
        restored.compile(restored.optimizer, "mse")
    restored.set_state_tree(tree_of(saved))
    with pytest.warns(kmp.PrecisionWarning, match="slots of 4 of 4"):
        restored.fit(X, Y, verbose=0)


@pytest.mark.only("jax")
def test_in_a_loop_of_ones_own():
    import jax

    model = renamed()
    weights = [v.value for v in model.trainable_variables]
    step = jax.jit(lambda *state: model.optimizer.stateless_apply(*state))
    with pytest.warns(kmp.PrecisionWarning, match="slots of 4 of 4") as said:
        slots = [v.value for v in model.optimizer.variables]
        model.optimizer.stateless_scale_loss(slots, weights[0][0, 0])
        step(slots, [np.ones(x.shape, "float32") for x in weights], weights)
    assert ours(said) == 1


@pytest.mark.only("jax")
def test_while_a_loop_of_ones_own_is_traced():
    import jax

    model = renamed()
    optimizer, weights = model.optimizer, [v.value for v in model.trainable_variables]
    slots = [v.value for v in (*optimizer.own_variables, *optimizer.inner_optimizer.variables)]
    with pytest.warns(kmp.PrecisionWarning, match="slots of 4 of 4"):
        jax.jit(optimizer.stateless_scale_loss)(slots, weights[0][0, 0])


def test_in_fit_and_its_callbacks():
    model = renamed()
    with pytest.warns(kmp.PrecisionWarning, match="slots of 4 of 4") as said:
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[kmp.callbacks.GradientHealth()])
    assert ours(said) == 1

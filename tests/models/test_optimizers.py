"""What a conversion does with the optimizers of a model."""

import keras
import kinds
import numpy as np
import pytest
from converted import X, sequential
from oracle import few

import kmp


class WithoutCall(keras.Model):
    """As keras.io's GANs: the train step calls the models inside, with optimizers of their own."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = sequential(), sequential()
        self.tracker = keras.metrics.Mean(name="loss")

    def compile(self, optimizer):
        super().compile()
        self.optimizer_of_generator = optimizer


def test_a_model_without_call_is_converted_and_audited():
    model = WithoutCall()
    model.compile(keras.optimizers.Adam())
    assert not model.built
    report = kmp.to_mixed_precision(model, "mixed_float16")
    parts = model.generator, model.discriminator
    assert [x.compute_dtype for part in parts for x in part.layers] == ["float16", "float32"] * 2
    assert report.untried == "" and isinstance(model.optimizer, keras.optimizers.RMSprop)
    assert "optimizer_of_generator (Adam) does not scale the loss" in report.optimizer
    (finding,) = kmp.audit(model).of_kind("unscaled float16")
    assert "optimizer_of_generator=kmp.scaled(Adam, ...)" in finding.advice
    model.compile(kmp.scaled("adam"))
    assert kmp.audit(model).of_kind("unscaled float16") == ()


def test_the_optimizer_is_wrapped_with_its_state():
    model = sequential()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=False)
    model.fit(X, X[:, :2], epochs=2, verbose=0)
    adam, state = model.optimizer, [v.numpy() for v in model.optimizer.variables]
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert model.optimizer.inner_optimizer is adam
    assert report.optimizer == "Adam was wrapped in kmp.LossScaleOptimizer, with its state."
    assert report.optimizer in str(report)
    assert model.optimizer.built  # so that it can be saved before it is trained
    for old, new in zip(state, adam.variables, strict=True):
        assert np.array_equal(old, new.numpy())
    history = model.fit(X, X[:, :2], verbose=0).history
    assert int(adam.iterations) == 3 and set(history) == {"loss", "mae"}


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.filterwarnings("ignore:Weights in float16")
def test_kerass_scale_goes_on_where_it_was(policy):
    model = sequential()
    inner = keras.optimizers.SGD(0.01, momentum=0.9)
    arguments = {"initial_scale": 256.0, "dynamic_growth_steps": 10}
    model.compile(keras.optimizers.LossScaleOptimizer(inner, **arguments), "mse")
    batch = np.tile(X, (3, 1))[:16]
    model.fit(batch, batch[:, :2], batch_size=1, verbose=0)
    before = float(model.optimizer.dynamic_scale), int(model.optimizer.step_counter)
    assert before == (512.0, 6)
    kmp.to_mixed_precision(model, policy)
    optimizer = model.optimizer
    assert (float(optimizer.dynamic_scale), int(optimizer.step_counter)) == before
    assert optimizer.loss_scale == kmp.DynamicLossScale(256.0, growth_interval=10)
    assert int(optimizer.iterations) == int(optimizer.steps) == 16


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_the_rule_that_skips_spikes_is_kept_with_its_state(policy):
    model = sequential()
    model.compile(kmp.scaled("adam", "none", spikes=kmp.SkipSpikes(factor=30)), "mse")
    model.fit(X, X[:, :2], batch_size=1, epochs=20, verbose=0)

    def remembered():
        variables = model.optimizer.own_variables
        return {v.name: float(keras.ops.max(v)) for v in variables if "spike" in v.name}

    before = remembered()
    assert before["spike_norms"] == 16 and before["spike_peak"] > 0
    for each in (policy, "float32"):
        kmp.to_mixed_precision(model, each)
        assert model.optimizer.spikes == kmp.SkipSpikes(factor=30)
        assert remembered() == before
    model.fit(X * 1e4, X[:, :2], verbose=0)
    assert int(model.optimizer.skipped_spikes) == 1


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: kmp.scaled("sgd"),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        lambda: keras.optimizers.SGD(loss_scale_factor=128.0),
    ],
    ids=["kmp", "keras", "factor"],
)
def test_an_optimizer_that_scales_the_loss_is_left_alone(optimizer):
    model = sequential()
    model.compile(optimizer(), "mse")
    mine = model.optimizer
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert model.optimizer is mine and report.optimizer == ""


@pytest.mark.parametrize("scale", ["none", 1.0])
def test_an_optimizer_that_kmp_made_and_that_scales_nothing_is_told_of(scale):
    model = sequential()
    model.compile(kmp.scaled("sgd", scale), "mse")
    with pytest.warns(kmp.PrecisionWarning, match="optimizer does not scale the loss: float16"):
        report = kmp.to_mixed_precision(model, "mixed_float16")
    assert "does not scale the loss" in report.optimizer and report.optimizer in str(report)
    assert kmp.to_mixed_precision(model, "mixed_bfloat16").optimizer == ""


def test_bfloat16_needs_no_loss_scaling_and_an_uncompiled_model_has_none():
    model = sequential()
    model.compile("sgd", "mse")
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert type(model.optimizer).__name__.endswith("SGD")
    model = sequential()
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert report.optimizer == "" and not model.compiled
    model.compile("sgd", "mse")  # Keras finds float16 by the name of the policy
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", few(["sequential", "simple_functional", "subclassed"], "sequential")
)
def test_a_model_compiled_with_strings_keeps_its_training_state_in_files(tmp_path, kind):
    model, x = kinds.KINDS[kind]()
    model.compile("adam", loss="mse", metrics=["mse"], jit_compile=False)
    kmp.to_mixed_precision(model, "mixed_float16")
    model.fit(x, x[:, :2], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, kmp.LossScaleOptimizer)
    assert int(loaded.optimizer.inner_optimizer.iterations) == 1
    for old, new in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        assert np.array_equal(old.numpy(), new.numpy())
    loaded.fit(x, x[:, :2], verbose=0)


def gan():
    """As in Keras's first examples: the discriminator is compiled, frozen, and compiled in both."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    generator = keras.Sequential([keras.Input((8,)), dense(16, "relu"), dense(4)])
    critic = keras.Sequential([keras.Input((4,)), dense(16, "relu"), dense(1)], name="critic")
    critic.compile(keras.optimizers.Adam(0.01), "mse", auto_scale_loss=False)
    critic.train_on_batch(np.ones((4, 4)), np.ones((4, 1)))
    critic.trainable = False
    noise = keras.Input((8,))
    both = keras.Model(noise, critic(generator(noise)))
    both.compile(keras.optimizers.Adam(0.01), "mse")
    return critic, both


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_a_model_inside_that_is_compiled_by_itself(policy):
    critic, both = gan()
    report = kmp.to_mixed_precision(both, policy)
    assert "critic.Adam was wrapped" in report.optimizer
    assert isinstance(critic.optimizer, kmp.LossScaleOptimizer)
    assert int(critic.optimizer.inner_optimizer.iterations) == 1
    assert kmp.audit(critic).of_kind("unscaled float16") == ()
    critic.trainable = True
    before = [keras.ops.convert_to_numpy(keras.ops.cast(w, "float32")) for w in critic.weights]
    losses = [float(critic.train_on_batch(X[:, :4], np.zeros((len(X), 1)))) for _ in range(30)]
    assert losses[-1] < losses[0] / 2
    for weight, was in zip(critic.weights, before, strict=True):
        now = keras.ops.convert_to_numpy(keras.ops.cast(weight, "float32"))
        assert (now != was).mean() > 0.5

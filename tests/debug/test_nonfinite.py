"""locate_nonfinite: each place at which a number can go wrong, and what the report says of it."""

import keras
import numpy as np
import pytest
from architectures import backward_through, make
from keras import layers, ops

import kmp
from kmp._backend import backend

HALF = "mixed_float16"
X = np.ones((2, 4), "float32")


def ones(units, name, dtype=HALF):
    return layers.Dense(units, kernel_initializer="ones", name=name, dtype=dtype)


def sequential(*stack, name="net"):
    return keras.Sequential([keras.Input((4,)), *stack], name=name)


def compiled(model, loss="mse", optimizer="sgd"):
    model.compile(optimizer, loss=loss, auto_scale_loss=False)
    return model


class Block(layers.Layer):
    """Its own code stands around two children."""

    def __init__(self, before=1.0, between=1.0, after=1.0, **kwargs):
        super().__init__(**kwargs)
        self.before, self.between, self.after = before, between, after
        self.up, self.down = (ones(4, name, dtype=self.dtype_policy) for name in ("up", "down"))

    def build(self, shape):
        self.up.build(shape)
        self.down.build(shape)

    def call(self, x):
        x = self.up(self.step(x, self.before))
        return self.step(self.down(self.step(x, self.between)), self.after)

    def step(self, x, factor):
        return x * factor


class BackwardBlock(Block):
    """The same for the gradient, which is multiplied and divided again."""

    def step(self, x, factor):
        return backward_through(x, ops.full((), factor, x.dtype))


@pytest.mark.parametrize(
    "place, after, before",
    [("before", None, "up"), ("between", "up", "down"), ("after", "down", None)],
)
@pytest.mark.parametrize("block", [Block, BackwardBlock])
def test_code_of_a_parent_is_placed_between_its_children(block, place, after, before):
    layer = block(**{place: 6e4}, name="block", dtype=HALF)
    model = compiled(sequential(ones(4, "first"), layer, ones(1, "last")))
    report = kmp.debug.locate_nonfinite(model, X, np.zeros((2, 1)), loss_scale=1.0)
    assert report.phase == ("forward" if block is Block else "backward"), str(report)
    assert (report.part, report.dtype) == ("code", "float16"), str(report)
    assert report.path.endswith("block")
    names = [path and path.split("/")[-1] for path in (report.after, report.before)]
    # Forward the code before the first child has only a follower, as has the code behind the last
    # a predecessor. Backward too: the order is that of execution.
    assert names == [after, before], str(report)
    assert "float16" in report.cause
    assert f"the code of {report.path}" in str(report)


def test_a_shared_layer_is_named_with_its_call():
    inputs = keras.Input((4,))
    shared = ones(4, "shared")
    outputs = shared(shared(shared(inputs) * 20.0) * 100.0)  # 4, 320, 128000
    report = kmp.debug.locate_nonfinite(keras.Model(inputs, outputs), X)
    assert report.path == "shared (call 3)"
    assert [s.max_abs for s in report.inputs] == [32000.0]
    assert report.inputs[0].nonfinite == 0
    assert report.outputs[0].nonfinite == 8


def test_an_operation_of_a_functional_model_is_named():
    inputs = keras.Input((4,))
    outputs = ops.square(ones(4, "first")(inputs) * 100.0)
    model = keras.Model(inputs, outputs)
    report = kmp.debug.locate_nonfinite(model, X)
    assert report.path == "square"
    assert report.dtype == "float16"


def test_nested_models_are_looked_into():
    inner = keras.Sequential(
        [keras.Input((4,)), ones(4, "fine"), layers.Rescaling(6e4, name="loud", dtype=HALF)],
        name="inner",
    )
    report = kmp.debug.locate_nonfinite(sequential(ones(4, "first"), inner), X)
    assert report.path.split("/")[-1] == "loud"
    assert report.phase == "forward"


def test_the_cast_of_the_inputs():
    report = kmp.debug.locate_nonfinite(sequential(ones(4, "first")), X * 1e5)
    assert (report.part, report.dtype) == ("cast", "float16")
    assert (report.inputs[0].dtype, report.outputs[0].dtype) == ("float32", "float16")
    assert "largest 1e+05" in report.cause
    assert "the cast of the inputs of" in str(report)


def test_a_bad_batch_is_nobodys_fault():
    report = kmp.debug.locate_nonfinite(sequential(ones(4, "first")), X * np.nan)
    assert (report.phase, report.part, report.path) == ("forward", "data", None)
    assert "the batch itself" in str(report)


def test_weights_that_are_not_finite_are_named():
    model = sequential(ones(4, "first"), ones(4, "second"))
    kernel = model.get_layer("second").kernel
    kernel.assign(ops.full((4, 4), np.nan))
    report = kmp.debug.locate_nonfinite(model, X)
    assert report.path.endswith("second")
    assert report.cause == f"16 numbers of its variable {kernel.path} are not finite"


def test_statistics_that_the_replay_spoils_are_no_cause():
    """A batch normalization takes in what is not finite: no reason to name the model around it."""
    model = sequential(ones(4, "first"), layers.BatchNormalization(), ones(4, "last"))
    kernel = model.get_layer("first").kernel
    kernel.assign(ops.full((4, 4), np.inf))
    report = kmp.debug.locate_nonfinite(model, X)
    assert report.path.endswith("first"), str(report)
    assert report.cause == f"16 numbers of its variable {kernel.path} are not finite"


def test_a_layer_in_float32_is_not_a_matter_of_precision():
    layer = layers.Lambda(lambda x: ops.log(x - 100.0), name="log", dtype="float32")
    report = kmp.debug.locate_nonfinite(sequential(ones(4, "first"), layer), X)
    assert report.path.endswith("log")
    assert "computes in float32, so not a matter of precision" in report.cause


def test_bfloat16_ends_later_than_float16():
    layer = layers.Rescaling(1e5, name="loud", dtype="mixed_bfloat16")
    model = sequential(ones(4, "first", "mixed_bfloat16"), layer)
    assert kmp.debug.locate_nonfinite(model, X).phase is None
    layer = layers.Rescaling(300.0, name="loud", dtype="mixed_bfloat16")
    model = sequential(ones(4, "first", "mixed_bfloat16"), layer)
    report = kmp.debug.locate_nonfinite(model, X * 1e36)
    assert report.path.endswith("loud")
    assert "not finite in float32 either" in report.cause


class Mask(layers.Layer):
    """-inf for half of the features, as masks of attention are."""

    def call(self, x):
        return ops.add(ops.zeros_like(x), np.array([0, 0, -np.inf, -np.inf], "float16"))


def test_a_mask_of_minus_inf_before_a_softmax_is_meant():
    inputs = keras.Input((4,))
    mask = Mask(dtype=HALF, name="mask")(inputs)
    masked = layers.Add(dtype=HALF)([ones(4, "first")(inputs), mask])
    outputs = layers.Softmax(name="softmax", dtype=HALF)(masked)
    assert kmp.debug.locate_nonfinite(keras.Model(inputs, outputs), X).phase is None
    fine = layers.Rescaling(100.0, name="fine", dtype=HALF)(outputs)
    loud = layers.Rescaling(6e4, name="loud", dtype=HALF)(fine)
    report = kmp.debug.locate_nonfinite(keras.Model(inputs, loud), X)
    assert report.path == "loud", str(report)
    report = kmp.debug.locate_nonfinite(keras.Model(inputs, layers.ReLU()(-masked)), X)
    assert report.path == "mask", str(report)


def test_a_mask_that_the_loss_answers_is_meant():
    inputs = keras.Input((4,))
    mask = Mask(dtype=HALF, name="mask")(inputs)
    model = keras.Model(inputs, layers.Add(dtype=HALF)([ones(4, "logits")(inputs), mask]))
    compiled(model, lambda y, p: ops.mean(ops.where(y < 0, p, y * ops.softmax(p))))
    y = np.array([[1.0, 0.0, 0.0, 0.0]] * 2)
    assert kmp.debug.locate_nonfinite(model, X, y, loss_scale=1.0).phase is None
    # d loss / d logits of the first class is 1/8 * 1/4.
    assert kmp.debug.locate_nonfinite(model, X, y, loss_scale=2.0**22).phase == "backward"
    assert kmp.debug.locate_nonfinite(model, X, -y - 1, loss_scale=1.0).path == "mask"


def test_a_batch_that_the_model_fills_in_is_meant():
    fill = layers.Lambda(lambda x: ops.where(ops.isnan(x), 1.0, x), name="fill")
    loud = layers.Rescaling(6e4, name="loud", dtype=HALF)
    model = sequential(fill, ones(4, "first"), loud)
    report = kmp.debug.locate_nonfinite(model, X * np.nan)
    assert report.path == "net/loud", str(report)


def test_layers_that_hand_on_what_they_are_given():
    """Their output is their input, the same tensor."""
    loud = layers.Rescaling(6e4, name="loud", dtype=HALF)
    stack = [ones(4, "first"), loud, layers.Identity(dtype=HALF), layers.Identity(dtype=HALF)]
    report = kmp.debug.locate_nonfinite(sequential(*stack), X)
    assert report.path.endswith("loud"), str(report)


def test_the_loss():
    model = compiled(sequential(ones(1, "last", "float32")))
    report = kmp.debug.locate_nonfinite(model, X * 1e10, np.full((2, 1), 3e30))
    assert (report.phase, report.part, report.path) == ("loss", "loss", None)
    assert "the outputs are finite, the loss is not" in str(report)
    assert report.cause == "the loss is not finite in float32 either: no loss scale can help"
    too_large_scaled = np.full((2, 1), 3e17)  # whose square times 2**15 is above 3.4e38
    report = kmp.debug.locate_nonfinite(model, X, too_large_scaled, loss_scale=2.0**15)
    assert report.cause == "the outputs are finite, and the loss times 32768 is not"


class Contrastive(keras.Model):
    """A loss of its own of what a layer returns, whose exponentials reach exp(`largest`)."""

    def __init__(self, largest, dtype, is_output):
        super().__init__()
        self.encoder = layers.Dense(4, name="encoder", dtype=dtype)
        self.head = layers.Dense(1, name="head")
        self.largest, self.is_output = largest, is_output

    def call(self, x):
        return self.encoder(self.head(x)) if self.is_output else self.head(self.encoder(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        z = ops.normalize(y_pred if self.is_output else self.encoder(x), axis=-1)
        return ops.mean(ops.exp(ops.sum(z * z, axis=-1) * self.largest))


@pytest.mark.quick
@pytest.mark.parametrize("is_output", [False, True], ids=["called by the loss", "output"])
@pytest.mark.parametrize("largest, cause", [(20.0, "finite in float32"), (200.0, "float32 either")])
def test_a_loss_of_its_own_says_whether_half_precision_is_to_blame(largest, cause, is_output):
    """And the advice is followed."""
    x, y = np.ones((2, 3), "float32"), np.ones((2, 1), "float32")

    def report(dtype):
        keras.config.set_dtype_policy("mixed_float16")
        model = Contrastive(largest, dtype, is_output)
        model(x)
        model.compile(kmp.scaled("sgd", "none"), None)
        return kmp.debug.locate_nonfinite(model, x, y)

    found = report(None)
    assert found.phase == "loss" and found.after.endswith("encoder") and cause in found.cause
    if largest == 20.0:
        assert "dtype='float32'" in found.cause
        assert report("float32").phase != "loss"


class Penalty(layers.Layer):
    """Adds a root of what may be negative to the loss, and hands its inputs on."""

    def call(self, x):
        self.add_loss(ops.sum(ops.sqrt(x)))
        return x


class Auxiliary(layers.Layer):
    """Has a head that only the loss sees."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.head = layers.Rescaling(3e4, name="loud", dtype=HALF)

    def call(self, x):
        self.add_loss(ops.mean(ops.cast(self.head(x), "float32")))
        return x


def nan_of(x):
    return ops.sum(ops.sqrt(-ops.abs(x) - 1.0))


TERMS = {
    "add_loss": (lambda: [Penalty(name="penalty")], -X, "penalty", "adds to the loss"),
    "activity": (
        lambda: [layers.Identity(activity_regularizer=nan_of, name="active")],
        X,
        "active",
        "activity regularizer",
    ),
    "regularizer": (
        lambda: [layers.Dense(1, kernel_regularizer=nan_of, name="held")],
        X,
        "held",
        "the regularizer of ",
    ),
}


@pytest.mark.parametrize("with_y", [True, False], ids=["y", "no y"])
@pytest.mark.parametrize("kind", TERMS)
def test_terms_of_the_loss_that_belong_to_layers(kind, with_y):
    make, x, name, said = TERMS[kind]
    model = compiled(sequential(ones(4, "first"), *make(), ones(1, "last")))
    report = kmp.debug.locate_nonfinite(model, x, np.zeros((2, 1)) if with_y else None)
    assert (report.phase, report.part) == ("loss", kind.replace("activity", "add_loss"))
    assert report.path.endswith(name) and said in str(report), str(report)
    assert "no loss scale can help" in report.cause


class Divergence(layers.Layer):
    """Adds a sum of squares to the loss, as variational layers do."""

    def call(self, x):
        self.add_loss(1e-6 * ops.sum(ops.square(x)))
        return x


@pytest.mark.only("jax", "torch")  # TensorFlow adds no float16 to the loss: such a fit raises
@pytest.mark.parametrize("dtype", [HALF, "float32"])
def test_a_term_that_is_finite_in_float32_and_the_advice_on_it(dtype):
    """320 squared is inf in float16."""
    stack = [ones(4, "first"), Divergence(name="divergence", dtype=dtype), ones(1, "last")]
    model = compiled(sequential(*stack))
    x, y = np.full((2, X.shape[-1]), 320.0 / X.shape[-1], "float32"), np.zeros((2, 1))
    report = kmp.debug.locate_nonfinite(model, x, y)
    loss = model.evaluate(x, y, verbose=0)
    if dtype == "float32":
        assert report.phase != "loss" and np.isfinite(loss)
    else:
        assert (report.phase, report.part, loss) == ("loss", "add_loss", np.inf)
        assert report.path.endswith("divergence")
        assert (
            "finite in float32 (largest 0.8192): a number on the way left float16" in report.cause
        )
        assert "Keep this layer in float32 (dtype='float32')" in report.cause


def test_a_head_that_only_the_loss_sees():
    model = compiled(sequential(ones(4, "first"), Auxiliary(name="aux"), ones(1, "last")))
    report = kmp.debug.locate_nonfinite(model, X, np.zeros((2, 1)))
    assert report.phase == "forward" and report.path.endswith("loud"), str(report)


def test_without_targets_it_says_what_it_did_not_look_at():
    report = kmp.debug.locate_nonfinite(compiled(sequential(ones(1, "last"))), X)
    assert report.phase is None and "pass `y`" in str(report)


def test_a_gradient_that_the_output_cannot_hold():
    model = compiled(sequential(ones(4, "first"), ones(1, "last")))
    report = kmp.debug.locate_nonfinite(model, X, np.full((2, 1), -1e3), loss_scale=2.0**10)
    assert (report.phase, report.part, report.path) == ("backward", "loss", None)
    # d mse / d output = 2 * (16 + 1000) / 2 for either of two samples, times the scale.
    assert "A loss scale of at most 64 holds it" in report.cause
    holds = kmp.debug.locate_nonfinite(model, X, np.full((2, 1), -1e3), loss_scale=8.0)
    assert holds.phase is None, str(holds)


def test_the_weight_gradient_alone():
    """A sum over the batch: each term is finite, and so are the gradients of the activations."""
    model = compiled(sequential(ones(4, "first"), ones(1, "last")), loss="mae")
    x = np.full((64, 4), 1000.0, "float32")
    report = kmp.debug.locate_nonfinite(model, x, np.zeros((64, 1)), loss_scale=64.0)
    assert (report.phase, report.part) == ("backward", "weights"), str(report)
    assert report.path.endswith("last")
    assert [path.split("/")[-2:] for path in report.variables] == [["last", "kernel"]]
    # 64 samples with an input of 4000 and a gradient of 64 / 64.
    assert "largest 2.56e+05" in report.cause
    assert "A loss scale of at most 16 holds it" in report.cause


def test_the_scale_is_the_optimizers_own():
    rule = kmp.DynamicLossScale(initial_scale=2.0**9)
    model = compiled(sequential(ones(1, "last")), optimizer=kmp.scaled("sgd", rule))
    assert kmp.debug.locate_nonfinite(model, X, np.zeros((2, 1))).loss_scale == 512.0
    model = compiled(sequential(ones(1, "last")))
    assert kmp.debug.locate_nonfinite(model, X, np.zeros((2, 1))).loss_scale == 1.0


def test_sample_weights_count():
    model = compiled(sequential(ones(1, "last")))
    y, weights = np.zeros((2, 1)), np.array([1.0, 1e6])
    assert kmp.debug.locate_nonfinite(model, X, y).phase is None
    assert kmp.debug.locate_nonfinite(model, X, y, weights).phase == "backward"


def test_the_compiled_scan_of_a_recurrent_layer_is_named_as_a_whole():
    model = keras.Sequential(
        [keras.Input((3, 4)), layers.SimpleRNN(4, activation=None, name="rnn", dtype=HALF)]
    )
    model.layers[0].set_weights([np.ones((4, 4)) * 100, np.eye(4) * 100, np.zeros(4)])
    report = kmp.debug.locate_nonfinite(model, np.ones((2, 3, 4)))
    assert "rnn" in report.path
    assert "left float16" in report.cause


def test_gradients_of_embeddings():
    inputs = keras.Input((3,), dtype="int32")
    x = layers.Embedding(5, 4, name="words", dtype=HALF)(inputs)
    model = compiled(keras.Model(inputs, ones(1, "last")(layers.Flatten(dtype=HALF)(x))))
    words = np.array([[1, 1, 2]])
    report = kmp.debug.locate_nonfinite(model, words, np.ones((1, 1)), loss_scale=4.0)
    assert report.phase is None, str(report)


def test_nothing_to_train():
    model = compiled(sequential(ones(1, "last")))
    model.trainable = False
    assert kmp.debug.locate_nonfinite(model, X, np.ones((2, 1))).phase is None
    assert kmp.debug.compare_precisions(model, X, np.ones((2, 1))).gradient_sqnr == {}


class Batches(keras.utils.PyDataset):
    """Two batches."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X, X


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda: (keras.Sequential([ones(1, "a")]), X), "must be built"),
        (lambda: (sequential(ones(1, "a")), X, X), "must be compiled"),
        (lambda: (sequential(ones(1, "a")), Batches()), "one batch, .* Received: Batches. Pass"),
        (lambda: (sequential(ones(1, "a")), iter([X])), "one batch, .* Received: list_iterator"),
        (
            lambda: (compiled(sequential(ones(1, "a"))), X, X, None, 0.0),
            "`loss_scale` of ",
        ),
    ],
)
def test_bad_input_is_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        kmp.debug.locate_nonfinite(*arguments())


TOOLS = ("locate_nonfinite", "compare_precisions", "diagnose", "memory_report")


@pytest.mark.parametrize(
    "tool",
    [getattr(kmp.debug, f) for f in TOOLS],
)
def test_what_is_no_model_is_a_type_error(tool):
    with pytest.raises(TypeError, match=rf"`model` of {tool.__name__} must be a keras.Model\. Rec"):
        tool(ones(1, "a"), X)


def test_the_model_raises_what_it_raises():
    model, x, y = make("residual")
    with pytest.raises(Exception, match="expected shape"):
        kmp.debug.locate_nonfinite(model, x[:, :3], y)


@pytest.mark.parametrize("answer", [-6e4, 0.0], ids=["pooling", "attention"])
def test_weights_that_are_nan_are_never_meant(answer):
    """Max pooling on TensorFlow turns NaN into -65504, fused attention on torch into 0."""
    poisoned = ones(4, "poisoned")
    fill = layers.Lambda(lambda x: ops.where(ops.isnan(x), answer, x), name="fill", dtype=HALF)
    model = sequential(ones(4, "first"), poisoned, fill, ones(4, "last"))
    poisoned.kernel.assign(np.full((4, 4), np.nan))
    report = kmp.debug.locate_nonfinite(model, X)
    assert report.path == "net/poisoned", str(report)
    assert "16 numbers of its variable net/poisoned/kernel are not finite" in report.cause


def test_weights_that_are_nan_come_before_a_mask_that_they_spoil():
    inputs = keras.Input((4,))
    poisoned = ones(4, "poisoned")
    masked = layers.Add(dtype=HALF)([Mask(dtype=HALF)(inputs), poisoned(inputs)])
    model = keras.Model(inputs, layers.Softmax(dtype=HALF)(masked))
    assert kmp.debug.locate_nonfinite(model, X).phase is None
    poisoned.bias.assign(np.full(4, np.nan))
    assert kmp.debug.locate_nonfinite(model, X).path == "poisoned"


def test_a_loss_that_refuses_nan_leads_to_the_layer():
    """Binary cross-entropy on torch does."""
    model = compiled(sequential(ones(4, "loud"), layers.Dense(1, "sigmoid")), strict_loss)
    y = np.ones((2, 1))
    assert kmp.debug.locate_nonfinite(model, X, y, loss_scale=1.0).phase is None
    model.layers[0].bias.assign(np.full(4, np.nan))
    assert kmp.debug.locate_nonfinite(model, X, y).path == "net/loud"
    model.layers[0].bias.assign(np.zeros(4))
    with pytest.raises(ValueError, match="labels below 0"):
        kmp.debug.locate_nonfinite(model, X, -y)


def strict_loss(y, p):
    if backend.is_concrete(p):
        if (ops.convert_to_numpy(y) < 0).any():
            raise ValueError("labels below 0")
        if np.isnan(ops.convert_to_numpy(p)).any():
            raise ValueError("not a probability")
    return ops.mean(ops.square(p - y))

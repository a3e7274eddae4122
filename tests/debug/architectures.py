"""Six small models in mixed precision, and faults that are planted into one layer of them.

A fault replaces `layer.call` by one that goes wrong in the layer's compute dtype: on the way, not
in the result, so that float32 is right wherever the fault is one of precision.
"""

import inspect

import keras
import numpy as np
from keras import layers, ops

POLICY = "mixed_float16"
CLASSES, BATCH = 4, 8


def cnn():
    x = inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(4, 3, use_bias=False, name="conv")(x)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.ReLU(name="relu")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dropout(0.2, seed=1, name="dropout")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="logits")(x), name="cnn")


def residual():
    x = inputs = keras.Input((6,))
    for i in range(2):
        h = layers.Dense(6, activation="tanh", name=f"inner{i}")(x)
        x = layers.Add(name=f"add{i}")([x, layers.Dense(6, name=f"outer{i}")(h)])
    return keras.Model(inputs, layers.Dense(CLASSES, name="logits")(x), name="residual")


class Attention(layers.Layer):
    """One head, in the dtype of its own. JAX has no float16 `MultiHeadAttention` on CPUs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.query = layers.Dense(4, name="query", dtype=self.dtype_policy)
        self.value = layers.Dense(4, name="value", dtype=self.dtype_policy)

    def build(self, shape):
        self.query.build(shape)
        self.value.build(shape)

    def call(self, x):
        query = self.query(x)
        scores = ops.softmax(ops.matmul(query, ops.transpose(query, (0, 2, 1))) / 2.0)
        return ops.matmul(scores, self.value(x))


def transformer():
    x = inputs = keras.Input((5, 4))
    x = layers.Add(name="add")([x, Attention(name="attention")(x)])
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Dense(4, activation="gelu", name="mlp")(x)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="logits")(x), name="transformer")


def lstm():
    return keras.Sequential(
        [
            keras.Input((4, 3)),
            layers.Dense(4, name="embed"),
            layers.LSTM(4, unroll=True, name="lstm"),  # JAX compiles a scan at each call
            layers.Dense(CLASSES, name="logits"),
        ],
        name="recurrent",
    )


class Shared(keras.Model):
    """Calls one layer twice, and a nested model."""

    def __init__(self):
        super().__init__(name="subclassed")
        self.first = layers.Dense(5, name="first")
        self.shared = layers.Dense(5, activation="tanh", name="shared")
        self.head = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(5, name="hidden"),
                layers.Dense(CLASSES, name="logits"),
            ],
            name="head",
        )

    def call(self, x):
        x = self.first(x)
        return self.head(ops.add(self.shared(x), self.shared(ops.square(x))))


def autoencoder():
    encoder = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, activation="relu", name="down")], name="encoder"
    )
    decoder = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="up"), layers.Dense(6, name="image")],
        name="decoder",
    )
    inputs = keras.Input((6,))
    return keras.Model(inputs, decoder(encoder(inputs)), name="autoencoder")


# The model, the shape of a sample, and the layers into which faults are planted: not the first
# ones, through whose inputs no gradient flows backwards.
ARCHITECTURES = {
    "cnn": (cnn, (6, 6, 1), ("norm", "relu", "flatten", "logits")),
    "residual": (residual, (6,), ("outer0", "add0", "inner1", "outer1", "logits")),
    "transformer": (transformer, (5, 4), ("norm", "mlp", "pool", "add", "logits")),
    "lstm": (lstm, (4, 3), ("lstm", "logits")),
    "subclassed": (Shared, (5,), ("shared", "hidden", "logits")),
    "autoencoder": (autoencoder, (6,), ("up", "image")),
}


def make(architecture, policy=POLICY, optimizer="sgd"):
    """A built and compiled model under `policy`, with a batch for it."""
    build, shape, _ = ARCHITECTURES[architecture]
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = build()
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH, *shape)).astype("float32")
    model(x)
    keras.config.set_dtype_policy("float32")
    if architecture == "autoencoder":
        y, loss = x, "mse"
    else:
        y = np.arange(BATCH) % CLASSES
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, auto_scale_loss=False)
    return model, x, y


def find(model, name):
    """The layer of that name, wherever it is."""
    return next(layer for layer in model._flatten_layers() if layer.name == name)


@ops.custom_gradient
def backward_through(x, factor):
    """`x`; its gradient is multiplied by `factor` and divided again."""

    def gradient(*args, upstream=None):
        upstream = args[0] if upstream is None else upstream
        return upstream * factor / factor, ops.zeros_like(factor)

    return ops.copy(x), gradient


def on_the_way(x, factor):
    """`x`, through `x * factor`, in the dtype of `x`."""
    half = ops.cast(factor**0.5, x.dtype)
    return x * half * half / half / half


FAULTS = {
    # Of activations near 1 the way leads over 1e8, and of gradients near 0.1 at a scale of 1024.
    "overflow": lambda x: on_the_way(x, 1e8),
    "gradient": lambda x: backward_through(x, ops.full((), 3e4, x.dtype)),
    # Over 1e-12 for float16.
    "underflow": lambda x: on_the_way(x, 1e-12),
    "nan": lambda x: x + ops.log(ops.cast(-1.0, x.dtype)),
}
CURABLE = ("overflow", "gradient", "underflow")


def plant(layer, fault):
    """Make `layer` go wrong; no layer notices, for Keras looks at `call` when it is called."""
    call, go_wrong = layer.call, FAULTS[fault]

    def faulty(*args, **kwargs):
        return go_wrong(call(*args, **kwargs))

    faulty.__signature__ = inspect.signature(call)
    object.__setattr__(layer, "call", faulty)

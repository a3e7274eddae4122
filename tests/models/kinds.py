"""The kinds of models that are converted: 22 of them, each small, each by a function of its own."""

import keras
import numpy as np
from keras import layers, ops

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(8, 6)).astype("float32")
IMAGES = RNG.normal(size=(8, 8, 8, 3)).astype("float32")
SEQUENCES = RNG.normal(size=(8, 5, 4)).astype("float32")
TOKENS = RNG.integers(0, 11, size=(8, 5)).astype("int32")


def head(x):
    return layers.Dense(2, name="head")(x)


def functional(inputs_of, body):
    inputs = keras.Input(inputs_of.shape[1:], dtype=inputs_of.dtype.name)
    return keras.Model(inputs, head(body(inputs))), inputs_of


def sequential():
    stack = [keras.Input((6,)), layers.Dense(8, "relu", name="body"), layers.Dense(2, name="head")]
    return keras.Sequential(stack), VECTORS


def simple_functional():
    return functional(VECTORS, layers.Dense(8, "relu", name="body"))


@keras.saving.register_keras_serializable(package="kinds")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.body = layers.Dense(8, "relu", name="body")
        self.gain = self.add_weight((8,), "ones", name="gain")
        self.last = layers.Dense(2, name="head")

    def call(self, x):
        return self.last(self.body(x) * self.gain)


def subclassed():
    model = Subclassed()
    model(VECTORS)
    return model, VECTORS


@keras.saving.register_keras_serializable(package="kinds")
class Block(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.up = layers.Dense(units, "relu", name="up")
        self.down = layers.Dense(units, name="down")

    def build(self, input_shape):
        self.up.build(input_shape)
        self.down.build((*input_shape[:-1], self.units))
        self.late = layers.Dense(self.units, name="late")  # created when it is built
        self.late.build((*input_shape[:-1], self.units))

    def call(self, x):
        return self.late(self.down(self.up(x)))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def custom_composite_layer():
    return functional(VECTORS, Block(8, name="body"))


def batch_normalization():
    def body(x):
        return layers.BatchNormalization(name="norm")(layers.Dense(8, name="body")(x))

    return functional(VECTORS, body)


def convolutions():
    stack = [
        keras.Input((8, 8, 3)),
        layers.Conv2D(4, 3, padding="same", name="body"),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.MaxPooling2D(),
        layers.DepthwiseConv2D(3),
        layers.GlobalAveragePooling2D(),
        layers.Dense(2, name="head"),
    ]
    return keras.Sequential(stack), IMAGES


def attention():
    def body(x):
        x = layers.MultiHeadAttention(2, 4, name="body")(x, x)
        return layers.Flatten()(layers.LayerNormalization()(x))

    return functional(SEQUENCES, body)


def lstm():
    return functional(SEQUENCES, layers.LSTM(4, name="body"))


def gru():
    return functional(SEQUENCES, layers.GRU(4, name="body"))


def bidirectional():
    return functional(SEQUENCES, layers.Bidirectional(layers.LSTM(4), name="body"))


def rnn_of_cells():
    cells = [layers.LSTMCell(4), layers.GRUCell(3)]
    return functional(SEQUENCES, layers.RNN(cells, name="body"))


def lambda_layer():
    def body(x):
        return layers.Lambda(ops.tanh)(layers.Dense(8, name="body")(x))

    return functional(VECTORS, body)


def ops_layers():
    def body(x):
        hidden = layers.Dense(8, name="body")(x)
        return ops.concatenate([ops.relu(hidden)[:, :4] * 2 + 1, hidden], axis=-1)

    return functional(VECTORS, body)


def rescaling():
    def body(x):
        return layers.Dense(8, name="body")(layers.Rescaling(1e-5, name="raw")(x))

    model, x = functional(VECTORS, body)
    return model, x * 1e5  # beyond the range of float16


def normalization():
    normalize = layers.Normalization(mean=[1e5] * 6, variance=[1e8] * 6, name="raw")
    model, x = functional(VECTORS, lambda x: layers.Dense(8, name="body")(normalize(x)))
    return model, 1e5 + 1e4 * x


def softmax_head():
    stack = [
        keras.Input((6,)),
        layers.Dense(8, "relu", name="body"),
        layers.Dense(2, name="head"),
        layers.Softmax(name="softmax"),
    ]
    return keras.Sequential(stack), VECTORS


def nested():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(8, name="body")], name="inner")
    return functional(VECTORS, inner)


def shared_layer():
    shared = layers.Dense(6, name="body")
    return functional(VECTORS, lambda x: layers.Add()([shared(x), shared(shared(x))]))


def time_distributed():
    def body(x):
        return layers.Flatten()(layers.TimeDistributed(layers.Dense(3), name="body")(x))

    return functional(SEQUENCES, body)


def group_normalization():
    def body(x):
        return layers.GroupNormalization(2)(layers.Dense(8, name="body")(x))

    return functional(VECTORS, body)


def spectral_normalization():
    return functional(VECTORS, layers.SpectralNormalization(layers.Dense(8), name="body"))


def embedding():
    def body(x):
        return layers.GlobalAveragePooling1D()(layers.Embedding(11, 8, name="body")(x))

    return functional(TOKENS, body)


def several_outputs():
    inputs = keras.Input((6,))
    body = layers.Dense(8, "relu", name="body")(inputs)
    outputs = {"head": layers.Dense(2, name="head")(body), "other": layers.Dense(1)(body)}
    return keras.Model(inputs, outputs), VECTORS


KINDS = {
    build.__name__: build
    for build in (
        sequential,
        simple_functional,
        subclassed,
        custom_composite_layer,
        batch_normalization,
        convolutions,
        attention,
        lstm,
        gru,
        bidirectional,
        rnn_of_cells,
        lambda_layer,
        ops_layers,
        rescaling,
        normalization,
        softmax_head,
        nested,
        shared_layer,
        time_distributed,
        group_normalization,
        spectral_normalization,
        embedding,
        several_outputs,
    )
}

"""Small models to quantize, and what tests ask of them; a new process imports it to load files."""

import keras
import numpy as np
from keras import layers, ops

import kmp
from kmp._keras import layers_of
from kmp.int8.fake_quantization import FakeQuantized

IMAGES = np.random.default_rng(0).normal(size=(8, 6, 6, 2)).astype("float32")
TARGETS = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")


def functional():
    """Each kind of layer, one in a nested model, and one that is left alone."""
    causal = layers.Conv1D(4, 2, padding="causal", dilation_rate=2, name="conv1")
    image = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, (2, 3), strides=(1, 2), groups=2, activation="relu", name="conv2")(image)
    x = layers.Reshape((5, 8))(layers.LayerNormalization(name="norm")(x))
    x = keras.Sequential([keras.Input((5, 8)), causal], name="inner")(x)
    return keras.Model(image, layers.Dense(3, name="head")(layers.Flatten()(x)))


@keras.saving.register_keras_serializable(package="quantized_models")
class Subclassed(keras.Model):
    """A model whose code makes its layers, as files do not know them."""

    def __init__(self, hands_on_training=True, **kwargs):
        super().__init__(**kwargs)
        self.hands_on_training = hands_on_training
        self.conv = layers.Conv2D(4, 3, activation="relu")
        self.flatten = layers.Flatten()
        self.head = layers.Dense(3)

    def call(self, inputs, training=None):
        training = training if self.hands_on_training else False
        x = self.flatten(self.conv(inputs, training=training))
        return self.head(x, training=training)


def subclassed():
    model = Subclassed()
    model(IMAGES)
    return model


def attention():
    """Keras's attention layer makes its projections itself: its config does not list them."""
    image = keras.Input((6, 6, 2))
    x = layers.Reshape((6, 12))(image)
    x = layers.MultiHeadAttention(2, 3, name="attention")(x, x)
    return keras.Model(image, layers.Dense(3, name="head")(layers.Flatten()(x)))


MODELS = {"functional": functional, "subclassed": subclassed, "attention": attention}
OBSERVER = ("input_range", "observed_batches", "freeze_at")


def value(variable):
    return ops.convert_to_numpy(variable).copy()


def values(variables):
    return [value(v) for v in variables]


def assert_equal(some, others):
    for a, b in zip(some, others, strict=True):
        np.testing.assert_array_equal(a, b)


def prepared(model):
    return [layer for layer in layers_of(model) if isinstance(layer, FakeQuantized)]


def observers(model):
    return [getattr(layer, name) for layer in prepared(model) for name in OBSERVER]


def optimizer(scale="dynamic"):
    """Without the measurements, which take long to compile and are tested elsewhere."""
    inner = keras.optimizers.SGD(0.01, momentum=0.5)
    return kmp.LossScaleOptimizer(inner, loss_scale=scale, measure_gradients=False)


def one_dense(policy="float32", jit=False, **settings):
    """A prepared Dense layer of three inputs."""
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, dtype=policy)])
    kmp.quantize_aware(model, **settings)
    model.compile(optimizer(1.0), "mse", jit_compile=jit)
    model.optimizer.build(model.trainable_variables)  # or TensorFlow traces the step twice
    return model, model.layers[0]


def fit(model, *batches):
    for x in batches:
        x = np.broadcast_to(np.float32(x), (2, 3))
        model.fit(x, np.zeros((2, 2)), batch_size=2, verbose=0)

"""The models in the files of this folder: how each is made, trained and converted.

Inputs are small whole numbers, and weights are rounded to eighths after training. So every product
and every sum of a Dense layer is exact in bfloat16, float16 and float32 alike, in any order: the
predictions are the same on every machine and backend, except where a layer divides or rounds.
"""

import keras
import numpy as np
from keras import layers

import kmp

STEPS = 3
LEARNING_RATE = 1 / 16
GRID = 8

_random = np.random.default_rng(3)
# In int8 the largest, 3, becomes 127, and no other number falls between two integers.
X = _random.integers(-1, 4, size=(8, 6)).astype("float32")
Y = _random.integers(-2, 3, size=(8, 2)).astype("float32")
IMAGES = _random.integers(-1, 4, size=(8, 5, 5, 2)).astype("float32")


def perceptron(optimizer):
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, activation="relu", name="body"),
            layers.Dense(2, name="head"),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def adam(loss_scale="dynamic", **arguments):
    return kmp.scaled("adam", loss_scale, learning_rate=LEARNING_RATE, **arguments)


def dynamic():
    return perceptron(adam(kmp.DynamicLossScale(initial_scale=256, growth_interval=2)))


def static():
    return perceptron(adam(1024))


def none():
    return perceptron(adam("none"))


def amax():
    return perceptron(adam(kmp.AmaxLossScale(headroom_bits=6)))


def drop_window():
    rule = kmp.DynamicLossScale(initial_scale=2.0**20, growth_interval=100)
    return perceptron(adam(rule, on_overflow="drop_window", gradient_accumulation_steps=2))


def kmp_layers():
    keras.utils.set_random_seed(5)
    mixed = kmp.Policy("p=f32,c=f16,o=f32")
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, dtype=kmp.Policy("mixed_float16"), name="body"),
            kmp.layers.Float32BatchNormalization(dtype=mixed, name="norm"),
            layers.ReLU(dtype=mixed, name="relu"),
            kmp.layers.Float32OutputDense(2, dtype="mixed_float16", name="head"),
        ]
    )
    model.compile(adam(), "mse")
    return model


@keras.saving.register_keras_serializable(package="saved_files")
class Subclassed(keras.Model):
    """A model whose own code makes its layers: a file does not list them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = keras.Sequential([layers.Dense(4), layers.ReLU()], name="block")
        self.head = layers.Dense(2, name="head")

    def call(self, inputs, training=None):
        return self.head(self.block(inputs, training=training), training=training)


def subclassed():
    keras.utils.set_random_seed(5)
    model = Subclassed()
    model(X)
    model.compile(keras.optimizers.Adam(LEARNING_RATE), "mse")
    return model


@keras.saving.register_keras_serializable(package="saved_files")
class Residual(layers.Layer):
    """A block whose own code makes its layers."""

    def __init__(self, blocks=0, **kwargs):
        super().__init__(**kwargs)
        self.blocks = blocks
        self.inner = Residual(blocks - 1) if blocks else layers.Dense(6, "relu")

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, inputs):
        return inputs + self.inner(inputs)

    def get_config(self):
        return {**super().get_config(), "blocks": self.blocks}


def residual():
    keras.utils.set_random_seed(5)
    inputs = keras.Input((6,))
    x = Residual(1, name="blocks")(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    model.compile(keras.optimizers.Adam(LEARNING_RATE), "mse")
    return model


def converted(model, policy):
    kmp.to_mixed_precision(model, policy)
    return model


def converted_float16():
    return converted(perceptron(keras.optimizers.Adam(LEARNING_RATE)), "mixed_float16")


def converted_bfloat16():
    return converted(perceptron(keras.optimizers.Adam(LEARNING_RATE)), "mixed_bfloat16")


def converted_subclassed_float16():
    return converted(subclassed(), "mixed_float16")


def converted_subclassed_bfloat16():
    return converted(subclassed(), "p=f32,c=bf16,o=f32")


def converted_blocks_float16():
    """Its file has one list of policies, of all layers of the model."""
    return converted(residual(), "mixed_float16")


def converted_blocks_bfloat16():
    """Its file has the policies of each block's layers with the block."""
    return converted(residual(), "p=f32,c=bf16,o=f32")


def quantize_aware():
    keras.utils.set_random_seed(5)
    image = keras.Input((5, 5, 2))
    x = layers.Conv2D(4, 3, activation="relu", name="body")(image)
    model = keras.Model(image, layers.Dense(2, name="head")(layers.Flatten()(x)))
    model.compile(adam(), "mse")
    kmp.quantize_aware(model, weight_bits=6, freeze_after=2)
    return model


def subclassed_quantize_aware():
    model = subclassed()
    kmp.quantize_aware(model)
    return model


MODELS = {
    each.__name__: each
    for each in (
        dynamic,
        static,
        none,
        amax,
        drop_window,
        kmp_layers,
        converted_float16,
        converted_bfloat16,
        converted_subclassed_float16,
        converted_subclassed_bfloat16,
        converted_blocks_float16,
        converted_blocks_bfloat16,
        quantize_aware,
        subclassed_quantize_aware,
    )
}


WEIGHTS_ALONE = ("dynamic", "drop_window")  # also written without the model


def stems(name):
    """The files of a model: its own, and for one that is quantization-aware its int8 result."""
    return (name, f"{name}_int8") if "quantize_aware" in name else (name,)


def inputs_of(name):
    """What the model named `name` was trained on, and its predictions are of."""
    return IMAGES if name.startswith("quantize_aware") else X


def trained(name):
    """The model after three steps, the last of which overflows where a window is to be dropped."""
    model, x = MODELS[name](), inputs_of(name)
    for step in range(STEPS):
        overflows = name == "drop_window" and step == STEPS - 1
        model.train_on_batch(np.full_like(x, np.inf) if overflows else x, Y)
    for weight in model.trainable_variables:
        weight.assign(np.round(keras.ops.convert_to_numpy(weight) * GRID) / GRID)
    return model


def policies(model):
    """The compute and output dtype of each layer, by the names of their classes."""
    rows = model._flatten_layers()
    rows = [x for x in rows if not isinstance(x, (layers.InputLayer, keras.Model))]
    words = [(type(x).__name__, x.compute_dtype, x.dtype_policy) for x in rows]
    return [f"{name} {dtype} {getattr(p, 'output_dtype', dtype)}" for name, dtype, p in words]


def state(model):
    """Every number that is stored, by name: the model's, the inner optimizer's and kmp's own."""
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer).variables
    shared = {id(v) for v in inner}
    own = [v for v in optimizer.variables if id(v) not in shared]
    found = {f"model {i} {v.name}": v for i, v in enumerate(model.variables)}
    found |= {f"inner {i}": v for i, v in enumerate(inner)}  # Keras names them after the model
    found |= {f"own {v.name}": v for v in own}
    return {name: keras.ops.convert_to_numpy(v) for name, v in found.items()}

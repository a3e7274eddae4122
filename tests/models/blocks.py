"""Models with blocks whose own code makes their layers; importable, so that a new process can."""

import keras
import numpy as np
from keras import layers
from translation import translation

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(4, 6)).astype("float32")
SEQUENCES = RNG.normal(size=(4, 5, 6)).astype("float32")

register = keras.saving.register_keras_serializable(package="blocks")


@register
class Residual(layers.Layer):
    """Makes its layers in `__init__`; the sum needs both sides in one dtype."""

    def __init__(self, units=6, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.inner = layers.Dense(units, "relu", name="inner")
        self.norm = layers.LayerNormalization()

    def build(self, input_shape):
        self.inner.build(input_shape)
        self.norm.build(input_shape)

    def call(self, x):
        return x + self.norm(self.inner(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@register
class Unbuilt(layers.Layer):
    """A residual block without `build`: its layers are built when it is called."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(6)

    def call(self, x):
        return x + self.inner(x)


@register
class InTime(Residual):
    """A block for `TimeDistributed`, which builds it and wants to know the shape of its outputs."""

    def compute_output_shape(self, input_shape):
        return input_shape


@register
class MakesInBuild(layers.Layer):
    """Makes its layers when it is built, and may leave their policy to the global one."""

    def __init__(self, hands_on=False, **kwargs):
        super().__init__(**kwargs)
        self.hands_on = hands_on
        self.first = layers.Dense(6)

    def build(self, input_shape):
        arguments = {"dtype": self.dtype_policy} if self.hands_on else {}
        self.first.build(input_shape)
        self.stack = [layers.Dense(6, **arguments), Residual(**arguments)]
        for layer in self.stack:
            layer.build(input_shape)

    def call(self, x):
        y = self.first(x)
        for layer in self.stack:
            y = y + layer(y)
        return x + y

    def get_config(self):
        return {**super().get_config(), "hands_on": self.hands_on}


@register
class Nested(layers.Layer):
    """Blocks in lists and in a Sequential model inside a block."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Residual(), Unbuilt(), MakesInBuild()]
        self.stack = keras.Sequential([layers.Dense(6), Residual()])

    def call(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x + self.stack(x)


@register
class Cell(layers.Layer):
    """A cell of an RNN, with a layer in it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.state_size = self.output_size = 6
        self.inner = layers.Dense(6, "tanh")

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, x, states):
        state = states[0] + self.inner(x)
        return state, [state]


@register
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Nested(), MakesInBuild(hands_on=True)]
        self.head = layers.Dense(2, name="head")

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x, training=training)


@register
class Holder(keras.Model):
    """A model for a train step of its own, around a Functional model that its config holds."""

    def __init__(self, backbone, **kwargs):
        super().__init__(**kwargs)
        self.backbone = backbone

    def call(self, x):
        return self.backbone(x)

    def get_config(self):
        backbone = keras.saving.serialize_keras_object(self.backbone)
        return {**super().get_config(), "backbone": backbone}

    @classmethod
    def from_config(cls, config):
        backbone = keras.saving.deserialize_keras_object(config.pop("backbone"))
        return cls(backbone, **config)


@register
class ModelInside(layers.Layer):
    """Makes models in `build`."""

    def build(self, input_shape):
        self.model = InnerModel()
        self.model.build(input_shape)
        self.stack = {"stack": keras.Sequential([layers.Dense(6), layers.ReLU()])}
        self.stack["stack"].build(input_shape)

    def call(self, x):
        return x + self.model(x) + self.stack["stack"](x)


@register
class InnerModel(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.block = layers.Dense(6), Residual()

    def call(self, x):
        return x + self.block(self.dense(x))


@register
class ResidualModel(InnerModel):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = layers.Dense(2, name="head")

    def call(self, x):
        return self.head(super().call(x))


@register
class FunctionalSubclass(keras.Model):
    """Made of inputs and outputs, as those with a train step of their own often are."""

    def train_step(self, *args, **kwargs):
        return super().train_step(*args, **kwargs)


@register
class SequentialBlock(keras.Sequential):
    """A block that is a Sequential model of layers that its code makes."""

    def __init__(self, units=6, **kwargs):
        super().__init__([layers.Dense(units), Residual(units)], **kwargs)
        self.units = units

    def get_config(self):
        return {"units": self.units, "name": self.name}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)


def functional(*blocks, x=VECTORS, kind=keras.Model):
    inputs = outputs = keras.Input(x.shape[1:])
    for block in blocks:
        outputs = block(outputs)
    return kind(inputs, layers.Dense(2, name="head")(outputs)), x


def shared():
    block = Residual()
    return functional(block, layers.Dense(6), block)


def sequential():
    stack = [keras.Input((6,)), Residual(), SequentialBlock(), layers.Dense(2)]
    return keras.Sequential(stack), VECTORS


def called(model):
    model(VECTORS)
    return model, VECTORS


def inner_models():
    inner = functional(Residual())[0]
    return functional(layers.Dense(6), inner, layers.Dense(6), Nested())


KINDS = {
    "residual": lambda: functional(Residual()),
    "without_build": lambda: functional(Unbuilt()),
    "makes_in_build": lambda: functional(MakesInBuild()),
    "makes_in_build_hands_on": lambda: functional(MakesInBuild(hands_on=True)),
    "nested": lambda: functional(Nested()),
    "model_inside": lambda: functional(InnerModel(), ModelInside()),
    "shared": shared,
    "sequential": sequential,
    "inner_models": inner_models,
    "functional_subclass": lambda: functional(Residual(), kind=FunctionalSubclass),
    "time_distributed": lambda: functional(layers.TimeDistributed(InTime()), x=SEQUENCES),
    "cell": lambda: functional(layers.RNN(Cell()), x=SEQUENCES),
    "subclassed": lambda: called(Subclassed()),
    "residual_model": lambda: called(ResidualModel()),
    "holder": lambda: called(Holder(functional(Residual(), Unbuilt())[0])),
    "translation": translation,
}

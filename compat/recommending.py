"""keras-rs: DLRM, deep and cross, retrieval with two towers, and list-wise ranking."""

import keras
import keras_rs
import numpy as np
from keras import layers
from program import BATCH, Program, classes, images, random

USERS, ITEMS, LIST, WIDTH = 20, 30, 6, 16


def features():
    """Numbers, and ids of three kinds; whether there was a click."""
    x = {"numbers": images((8,)), **{f"id{i}": classes(USERS) for i in range(3)}}
    return x, classes(2, 1)


def embedded(inputs: dict) -> list:
    """A vector for each input."""
    dense = layers.Dense(WIDTH, "relu", name="bottom")(inputs["numbers"])
    ids = (name for name in inputs if name != "numbers")
    return [dense, *(layers.Embedding(USERS, WIDTH, name=f"of_{x}")(inputs[x]) for x in ids)]


def inputs_of_features() -> dict:
    """Symbolic inputs of both click models."""
    ids = {f"id{i}": keras.Input((), dtype="int32", name=f"id{i}") for i in range(3)}
    return {"numbers": keras.Input((8,), name="numbers"), **ids}


def dlrm_model():
    """Dot products of all pairs of vectors, then a stack of layers."""
    inputs = inputs_of_features()
    vectors = embedded(inputs)
    x = layers.Concatenate()([vectors[0], keras_rs.layers.DotInteraction()(vectors)])
    x = layers.Dense(WIDTH, "relu", name="top")(x)
    return keras.Model(inputs, layers.Dense(1, "sigmoid", name="click")(x))


def cross_model():
    """Two crosses of low rank, then a stack of layers."""
    inputs = inputs_of_features()
    first = x = layers.Concatenate()(embedded(inputs))
    for i in range(2):
        x = keras_rs.layers.FeatureCross(projection_dim=4, name=f"cross{i}")(first, x)
    x = layers.Dense(WIDTH, "relu", name="top")(x)
    return keras.Model(inputs, layers.Dense(1, "sigmoid", name="click")(x))


@keras.saving.register_keras_serializable(package="programs")
class TwoTowers(keras.Model):
    """Scores every user against every item of the batch in the loss; the call gives the vectors."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.users = keras.Sequential([layers.Embedding(USERS, WIDTH), layers.Dense(WIDTH)])
        self.items = keras.Sequential([layers.Embedding(ITEMS, WIDTH), layers.Dense(WIDTH)])
        self.negatives = keras_rs.layers.HardNegativeMining(num_hard_negatives=2)

    def call(self, x, training=None):
        user = self.users(x["user"], training=training)
        return {"user": user, "item": self.items(x["item"], training=training)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        scores = keras.ops.matmul(y_pred["user"], keras.ops.transpose(y_pred["item"]))
        scores, labels = self.negatives(scores, keras.ops.eye(BATCH, dtype=scores.dtype))
        return super().compute_loss(x, labels, scores, sample_weight)


def towers_model():
    """Built by a call."""
    model = TwoTowers()
    model(visits()[0])
    return model


def visits():
    """Who took what."""
    items = np.resize(random().permutation(ITEMS), BATCH)
    return {"user": classes(USERS), "item": items}, classes(2)


def ranking_model():
    """A score for each item of a list, from the user and the item."""
    user = keras.Input((), dtype="int32", name="user")
    items = keras.Input((LIST,), dtype="int32", name="items")
    of_user = layers.RepeatVector(LIST)(layers.Embedding(USERS, WIDTH, name="users")(user))
    x = layers.Concatenate()([of_user, layers.Embedding(ITEMS, WIDTH, name="things")(items)])
    x = layers.Dense(WIDTH, "relu", name="body")(x)
    scores = layers.Reshape((LIST,))(layers.Dense(1, name="score")(x))
    return keras.Model({"user": user, "items": items}, scores)


def lists():
    """Users, items, and how well they liked them."""
    x = {"user": classes(USERS), "items": classes(ITEMS, LIST)}
    return x, random().integers(0, 5, (BATCH, LIST)).astype("float32")


def compile_ranking(model, wrap, **arguments):
    """With the ranking's own metric."""
    model.compile(
        wrap(keras.optimizers.Adam(1e-3)),
        loss=keras_rs.losses.ListMLELoss(),
        metrics=[keras_rs.metrics.NDCG(k=3)],
        **arguments,
    )


def compile_towers(model, wrap, **arguments):
    """The labels are those of a classifier over the batch."""
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(wrap(keras.optimizers.Adam(1e-3)), loss=loss, **arguments)


dlrm = Program(dlrm_model, features, "binary_crossentropy")
deep_cross = Program(cross_model, features, "binary_crossentropy")
two_towers = Program(towers_model, visits, compile=compile_towers)
ranking = Program(ranking_model, lists, compile=compile_ranking)

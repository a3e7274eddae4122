"""Programs of keras.io's kinds on sequences, graphs and games."""

import keras
import numpy as np
from keras import layers, ops
from program import BATCH, LENGTH, WORDS, Program, classes, crossentropy, images, random, words

NODES, ACTIONS = 6, 3


def seq2seq_model():
    """An LSTM reads, another writes from its states."""
    source = keras.Input((LENGTH,), dtype="int32", name="source")
    target = keras.Input((LENGTH,), dtype="int32", name="target")
    embed = layers.Embedding(WORDS, 16, mask_zero=True, name="embed")
    _, *states = layers.LSTM(16, return_state=True, name="encoder")(embed(source))
    x = layers.LSTM(16, return_sequences=True, name="decoder")(embed(target), initial_state=states)
    return keras.Model({"source": source, "target": target}, layers.Dense(WORDS, name="words")(x))


def ctc_model():
    """Convolution and a bidirectional GRU over a spectrogram; Keras's CTC loss."""
    x = inputs = keras.Input((2 * LENGTH, 8))
    x = layers.Conv1D(16, 3, padding="same", use_bias=False, name="conv")(x)
    x = layers.ReLU()(layers.BatchNormalization(name="norm")(x))
    x = layers.Bidirectional(layers.GRU(8, return_sequences=True), name="both")(x)
    return keras.Model(inputs, layers.Dense(6, name="letters")(x))


def translation_model():
    """Keras's own attention layers in a transformer with a causal decoder."""
    source = keras.Input((LENGTH,), dtype="int32", name="source")
    target = keras.Input((LENGTH,), dtype="int32", name="target")
    x = layers.Embedding(WORDS, 16, name="source_words")(source)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 8, name="reading")(x, x)])
    memory = layers.LayerNormalization(name="memory")(x)
    x = layers.Embedding(WORDS, 16, name="target_words")(target)
    own = layers.MultiHeadAttention(2, 8, name="writing")(x, x, use_causal_mask=True)
    x = layers.LayerNormalization(name="own")(layers.Add()([x, own]))
    x = layers.Add()([x, layers.MultiHeadAttention(2, 8, name="asking")(x, memory)])
    x = layers.Dense(16, "gelu", name="mlp")(layers.LayerNormalization(name="asked")(x))
    return keras.Model({"source": source, "target": target}, layers.Dense(WORDS, name="words")(x))


def sentences():
    """Two languages; the first sentence ends early."""
    source = words()
    source[0, -2:] = 0
    return {"source": source, "target": words()}, classes(WORDS, LENGTH)


@keras.saving.register_keras_serializable(package="programs")
class GraphAttention(layers.Layer):
    """Each node attends to its neighbours; where there is no edge the score is the lowest."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, states_shape, edges_shape):
        self.kernel = self.add_weight((states_shape[-1], self.units), name="kernel")
        self.ends = self.add_weight((self.units, 2), name="ends")

    def call(self, states, edges):
        states = ops.matmul(states, self.kernel)
        ends = ops.matmul(states, self.ends)
        scores = ops.leaky_relu(ends[..., :1] + ops.transpose(ends[..., 1:], (0, 2, 1)))
        scores = ops.where(ops.cast(edges, "bool"), scores, ops.full_like(scores, -1e4))
        return ops.relu(ops.matmul(ops.softmax(scores), states))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def graph_model():
    """Two rounds of attention, a label for each node."""
    states = keras.Input((NODES, 8), name="states")
    edges = keras.Input((NODES, NODES), dtype="int32", name="edges")
    x = layers.Dense(16, "relu", name="into")(states)
    for i in range(2):
        x = layers.Add()([x, GraphAttention(16, name=f"attention{i}")(x, edges)])
    return keras.Model({"states": states, "edges": edges}, layers.Dense(3, name="labels")(x))


def graphs():
    """Random graphs whose nodes are their own neighbours."""
    edges = classes(2, NODES, NODES) | np.eye(NODES, dtype="int32")
    return {"states": images((NODES, 8)), "edges": edges}, classes(3, NODES)


@keras.saving.register_keras_serializable(package="programs")
class DeepQ(keras.Model):
    """Q-learning: what an action is worth, against the reward and what a frozen copy expects."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.online, self.target = self._net("online"), self._net("target")
        self.target.trainable = False
        self.target.set_weights(self.online.get_weights())

    @staticmethod
    def _net(name):
        stack = [keras.Input((4,)), layers.Dense(16, "relu", name="hidden")]
        return keras.Sequential([*stack, layers.Dense(ACTIONS, name="worth")], name=name)

    def call(self, x, training=None):
        return self.online(x["state"], training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        taken = ops.one_hot(x["action"], ACTIONS)
        worth = ops.sum(ops.cast(y_pred, "float32") * taken, -1)
        later = ops.max(ops.cast(self.target(x["next"]), "float32"), -1)
        wanted = ops.stop_gradient(x["reward"] + 0.99 * later * (1 - x["done"]))
        return ops.mean(keras.losses.huber(wanted[:, None], worth[:, None]))


def deep_q_model():
    """Built by a call."""
    model = DeepQ()
    model(moves()[0])
    return model


def moves():
    """A few steps of a game; the rewards are part of the inputs."""
    x = {"state": images((4,)), "next": images((4,)) + 0.1, "action": classes(ACTIONS)}
    x["reward"] = random().random(BATCH).astype("float32")
    x["done"] = np.resize([1, 0, 0, 0], BATCH).astype("float32")
    return x, None


seq2seq = Program(seq2seq_model, sentences, crossentropy)
translation = Program(translation_model, sentences, crossentropy)
ctc = Program(
    ctc_model, lambda: (images((2 * LENGTH, 8)), classes(4, 5) + 1), lambda: keras.losses.CTC()
)
graph_attention = Program(graph_model, graphs, crossentropy)
deep_q = Program(deep_q_model, moves)

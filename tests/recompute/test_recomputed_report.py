"""memory_report says what a block keeps that is computed again, and what it would keep."""

import keras
import numpy as np
import pytest
from flat_models import residual
from keras import layers

import kmp
from kmp._keras.blocks import recomputed_in

ROWS, WIDTH, BLOCKS = 32, 64, 3
KEPT = 4 * ROWS * WIDTH  # the bytes of an input in float32
INSIDE = KEPT + 4 * KEPT + KEPT  # of what the three layers of a block put out


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inside = [
            layers.LayerNormalization(),
            layers.Dense(4 * WIDTH, "gelu"),
            layers.Dense(WIDTH),
        ]

    def build(self, shape):
        for layer in self.inside:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)

    def call(self, x):
        for layer in self.inside:
            x = layer(x)
        return x


def make_model(recomputed=True):
    blocks = [Block(name=f"block{i}") for i in range(BLOCKS)]
    head = layers.Dense(1, dtype="float32")
    model = keras.Sequential([keras.Input((WIDTH,)), *blocks, head], name="model")
    if recomputed:
        kmp.recompute(model)
    return model


def test_a_block_keeps_its_input_instead_of_what_is_inside():
    full, mixed, pure = kmp.debug.memory_report(make_model(), ROWS).rows
    paths = [f"model/block{i}" for i in range(BLOCKS)]
    assert full.blocks == tuple((path, KEPT, INSIDE) for path in paths)
    assert mixed.blocks == pure.blocks
    assert mixed.blocks == tuple((path, KEPT // 2, INSIDE // 2) for path in paths)
    inside_alone = INSIDE - KEPT  # its last output is the next one's input
    assert full.activations == (BLOCKS + 1) * KEPT + inside_alone + 4 * ROWS
    plain = kmp.debug.memory_report(make_model(False), ROWS).rows[0]
    assert plain.blocks == () and plain.activations == BLOCKS * INSIDE + 4 * ROWS


def test_it_prints_a_row_for_each_block():
    text = str(kmp.debug.memory_report(make_model(), ROWS)).splitlines()
    assert text[-4].split() == [
        "KiB",
        "computed",
        "again",
        "kept",
        "instead",
        "of",
        "kept",
        "in",
        "half",
        "instead",
        "of",
    ]
    assert text[-1].split() == ["model/block2", "8", "48", "4", "24"]
    assert "again" not in str(kmp.debug.memory_report(make_model(False), ROWS))


def test_masks_and_every_input_are_kept():
    class Attending(layers.Layer):
        def __init__(self):
            super().__init__(name="attending")
            self.attention = layers.MultiHeadAttention(2, 4)
            self.supports_masking = True

        def build(self, words_shape, memory_shape):
            self.attention.build(words_shape, memory_shape)

        def call(self, words, memory):
            return self.attention(words, memory)

    words, memory = keras.Input((6,), dtype="int32"), keras.Input((3, 8))
    embedded = layers.Embedding(9, 8, mask_zero=True)(words)
    model = keras.Model([words, memory], Attending()(embedded, memory))
    kmp.recompute(model, lambda layer, path: layer.name == "attending")
    x = [np.ones((4, 6), "int32"), np.ones((4, 3, 8), "float32")]
    (block,) = kmp.debug.memory_report(model, 4, x).rows[0].blocks
    assert block.kept == 4 * 4 * (6 + 3) * 8 + 4 * 6  # two inputs, and the mask of the words


def test_segments_keep_what_is_handed_to_them():
    model = residual()
    kmp.recompute(model)
    expected = [
        (each.last, sum(4 * ROWS * int(np.prod(x.shape[1:])) for x in each.inputs))
        for each in recomputed_in(model)
    ]
    found = kmp.debug.memory_report(model, ROWS).rows[0].blocks
    assert len(found) > 1 and [each[:2] for each in found] == expected
    assert all(each.instead > each.kept for each in found[1:])


@pytest.mark.only("jax")
def test_jax_keeps_as_many_bytes():
    """`saved_residuals` lists what `jax.vjp` would hold on to: here weights, inputs and the head's.

    Private: `jax._src.ad_checkpoint`.
    """
    import jax
    from jax._src.ad_checkpoint import saved_residuals

    model = make_model()
    values = [v.value for v in model.trainable_variables]

    def outputs(values, x):
        return model.stateless_call(values, [], x, training=True)[0]

    found = saved_residuals(outputs, values, jax.numpy.ones((ROWS, WIDTH)))
    weights = {v.shape for v in values}
    kept = sum(4 * aval.size for aval, _ in found if aval.shape not in weights)
    blocks = kmp.debug.memory_report(model, ROWS).rows[0].blocks
    assert kept == sum(block.kept for block in blocks) + KEPT  # the head keeps its input too

"""Frozen half weights that the code of a model moves, as the conversion and the audit see them."""

import keras
import pytest
from follower import Copier, Follower, Pair, share_moved
from keras import layers

import kmp


def frozen_weights(model):
    return [x.path for x in kmp.audit(model).of_kind("frozen weights")]


@pytest.mark.quick
def test_the_report_of_a_conversion_names_them():
    model = Follower()
    report = kmp.to_mixed_precision(model, "bfloat16")
    assert report.rounded.startswith("'pair/teacher' is frozen, and its weights are in bfloat16.")
    assert frozen_weights(model) == ["pair/teacher"]
    assert share_moved(model) == 0
    for model, policy in (Copier(), "bfloat16"), (Follower(), "mixed_bfloat16"):
        assert kmp.to_mixed_precision(model, policy).rounded == ""


def test_what_does_not_move_is_no_finding():
    """Nor is a base under LoRA's adapters, nor what is trained, nor what a model is made with."""
    keras.config.set_dtype_policy("bfloat16")
    frozen = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(8)])
    frozen.layers[0].trainable = False
    trained = Follower()
    trained.teacher.trainable = True

    class Initialized(Pair):
        def __init__(self):
            super().__init__()
            for mine, its in zip(self.teacher.weights, self.student.weights, strict=True):
                mine.assign(its)

    for model in Copier(), Initialized(), frozen, trained:
        assert frozen_weights(model) == []

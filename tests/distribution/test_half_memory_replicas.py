"""Weights and slots in bfloat16 under MirroredStrategy: every replica draws the same numbers."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from replicas import Run, mirrored, no_merge_call

import kmp

pytestmark = [pytest.mark.only("tensorflow"), pytest.mark.slow]
tf = pytest.importorskip("tensorflow")

OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=1.0),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "average": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
}
MEMORY = {
    "half": {},
    "float32": {"master_weights": True, "slot_dtype": "float32"},
    "24 bits": {"master_weights": 24, "slot_dtype": "int8"},
}
START = np.linspace(-1, 1, 4096)


def after_steps(strategy, make, graph, **memory):
    """The state of each replica after seven steps, of which one overflows on the last replica."""
    replicas = strategy.num_replicas_in_sync
    scaled = lambda: kmp.scaled(make(), loss_scale=1024, **memory)  # noqa: E731
    run = Run(strategy, scaled, START, graph=graph, dtype="bfloat16")
    random = np.random.default_rng(5)
    for step in range(7):
        shares = np.tile(random.normal(size=START.size).astype("float32") / replicas, (replicas, 1))
        if step == 3:
            shares[-1, 5] = np.inf
        run.step(shares)
    assert int(run.optimizer.skipped_steps.numpy()) == 1
    inner = [run.variable, *run.optimizer.inner_optimizer.variables]
    values = {v.path: run.on_each_replica(v) for v in inner}
    return [{path: each[i] for path, each in values.items()} for i in range(replicas)]


@functools.cache
def on_one_replica(name, memory, graph):
    (alone,) = after_steps(mirrored(1), OPTIMIZERS[name], graph, **MEMORY[memory])
    return alone


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("merge", [True, False], ids=["merge", "no_merge"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replicas_agree_with_each_other_and_with_one(name, memory, merge, graph):
    alone = on_one_replica(name, memory, graph)
    for replicas in (2, 4):
        strategy = mirrored(replicas)
        with contextlib.nullcontext() if merge else no_merge_call(strategy):
            found = after_steps(strategy, OPTIMIZERS[name], graph, **MEMORY[memory])
        for replica in found:
            for (path, a), b in zip(alone.items(), replica.values(), strict=True):
                np.testing.assert_array_equal(*(x.astype("float64") for x in (a, b)), path)

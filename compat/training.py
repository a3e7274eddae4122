"""The columns about training: fit, conversion, the file, and int8. Each raises if it fails."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import keras
import numpy as np
from program import Program
from runs import (
    QUICK,
    KerasCannotError,
    fitted,
    keras_scaled,
    kmp_scaled,
    leaves,
    made,
    norms,
    outputs,
    reseed,
    said,
)
from runs import sqnr as agreement_of

import kmp

# TensorFlow's "auto" is XLA, which takes four times as long to compile.
JIT = "auto" if keras.backend.backend() == "jax" or os.environ.get("PROGRAMS_XLA") else False
HERE = pathlib.Path(__file__).parent


def fit(program: Program) -> str:
    """Losses of `fit` in mixed_float16 are those of Keras's LossScaleOptimizer."""
    try:
        model = made(program, "mixed_float16", keras_scaled, jit_compile=JIT)
        reference = fitted(model, program)
        assert np.isfinite(reference).all(), f"losses {reference}"
    except Exception as error:
        raise KerasCannotError(f"fit with Keras's LossScaleOptimizer: {said(error)}") from error
    model = made(program, "mixed_float16", kmp_scaled, jit_compile=JIT)
    health = kmp.callbacks.GradientHealth(update_freq=1, optimizer=program.optimizer(model))
    losses = fitted(model, program, callbacks=[health])
    verdict = str(health.verdict).split(":")[0]
    np.testing.assert_allclose(losses, reference, rtol=1e-3)
    if losses == reference:
        return f"bit for bit; {verdict}"
    difference = np.max(np.abs(np.subtract(losses, reference)) / np.abs(reference))
    return f"to {difference:.0e}; {verdict}"


def convert(program: Program) -> str:
    """A float32 model that has trained a step is converted, says the same, and trains on."""
    model = made(program)
    fitted(model, program, 1)
    before = outputs(model, program)
    report = kmp.to_mixed_precision(model, "mixed_float16")
    layers = leaves(model)
    halves = sum(layer.compute_dtype == "float16" for layer in layers)
    assert halves, f"no layer computes in float16:\n{report}"
    agreement = agreement_of(before, outputs(model, program))
    assert agreement > 30, f"the outputs have {agreement:.0f} dB of those in float32"
    if program.own_optimizers:
        program.compiled(model, kmp_scaled, **QUICK)
    losses = fitted(model, program, 2)
    assert np.isfinite(losses).all(), f"losses {losses}"
    also = f", {agreement:.0f} dB" if before else ""
    return f"{halves} of {len(layers)} layers{also}"


def convert_by_keras(program: Program) -> None:
    """What Keras offers: the model rebuilt under the policy."""
    model = made(program, "mixed_float16", keras_scaled)
    losses = fitted(model, program, 2)
    assert np.isfinite(losses).all(), f"losses {losses}"
    reference = made(program)
    reference.set_weights(model.get_weights())
    agreement = agreement_of(outputs(reference, program), outputs(model, program))
    assert agreement > 30, f"the outputs have {agreement:.0f} dB of those in float32"


def file(program: Program, by_kmp: bool = True) -> str:
    """A converted model, saved in training, is loaded by a new process and goes on the same."""
    model = made(program)
    if by_kmp:
        kmp.to_mixed_precision(model, "mixed_float16")
        if program.own_optimizers:
            program.compiled(model, kmp_scaled, **QUICK)
    fitted(model, program, 2)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "model.keras")
        model.save(path)
        expected, sizes = outputs(model, program), norms(program.optimizer(model))
        reseed(model)
        losses = fitted(model, program, 2)
        np.savez(path.with_suffix(".npz"), *expected, losses=losses, sizes=sizes)
        command = [sys.executable, HERE / "load.py", program.name, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*Error\b", line)]
        raise RuntimeError(lines[-1] if lines else f"it ended with {done.returncode}")
    return done.stdout.strip().splitlines()[-1]


def file_by_keras(program: Program) -> None:
    """The same without kmp: a step in mixed precision, and the file of the model in float32."""
    losses = fitted(made(program, "mixed_float16", keras_scaled, **QUICK), program, 1)
    assert np.isfinite(losses).all(), f"losses {losses}"
    file(program, by_kmp=False)


def quantize_aware(program: Program) -> str:
    """Trains with int8's rounding, and becomes int8."""
    model = made(program, wrap=kmp_scaled)
    # What is frozen learns no range: the teacher of a distillation stays in float.
    report = kmp.quantize_aware(model, filter_fn=lambda layer, path: layer.trainable)
    losses = fitted(model, program, 2)
    assert np.isfinite(losses).all(), f"losses {losses}"
    before = outputs(model, program)
    number = f"{len(report.converted)} layers"
    try:
        kmp.to_int8(model)
        after = outputs(model, program)
    except Exception as error:
        try:
            quantize_by_keras(program)
        except Exception as other:
            return f"{number}; to int8 Keras cannot: {said(other)}"
        raise RuntimeError(f"to_int8: {said(error)}") from error
    agreement = agreement_of(before, after)
    assert agreement > 15, f"int8 has {agreement:.0f} dB of the trained model"
    return number + (f", int8 {agreement:.0f} dB" if before else "")


def fit_by_keras(program: Program) -> None:
    """Trains in float32 at all."""
    fitted(made(program), program, 1)


def quantize_by_keras(program: Program) -> None:
    """Keras's own int8, which needs no training."""
    model = made(program)
    fitted(model, program, 1)
    model.quantize("int8")
    outputs(model, program)

"""The columns about looking: audit and the tools of kmp.debug. Each raises if it fails."""

import keras
import numpy as np
from program import BATCH, Program
from runs import eager_by_keras, fitted, kmp_scaled, leaves, made, untouched

import kmp


def audit(program: Program) -> str:
    """The audit of the model in mixed_float16 with kmp's optimizer."""
    model = made(program, "mixed_float16", kmp_scaled)
    with untouched(model):
        found = kmp.audit(model)
    assert str(found)
    kinds = sorted({finding.kind for finding in found.findings})
    assert "unscaled float16" not in kinds, "takes the scaled loss for one that is not"
    return ", ".join(kinds) or "nothing dangerous"


def locate_nonfinite(program: Program) -> str:
    """A NaN in the weights of a layer, three layers in turn: the report names that layer."""
    model, x, y = program.replayed(made(program, "mixed_float16", kmp_scaled))
    report = kmp.debug.locate_nonfinite(model, x, y, loss_scale=1.0)
    assert report.phase is None, f"nothing is planted, and it says {report}"
    layers, named, around = leaves(model), 0, 0
    for i in sorted({0, len(layers) // 2, len(layers) - 1}):
        layer = layers[i]
        kept = [np.array(w) for w in layer.get_weights()]
        plant(layer)
        with untouched(model):
            report = kmp.debug.locate_nonfinite(model, x, y)
        path = (report.path or "").split(" ")[0]
        inside = layer.path.startswith(f"{path}/") and bool(path)
        assert path == layer.path or inside, f"planted in {layer.path}, it says {report}"[:300]
        named, around = named + (path == layer.path), around + inside
        layer.set_weights(kept)
    return f"{named} of {named + around}" + ", else the layer around it" * bool(around)


def plant(layer: keras.layers.Layer) -> None:
    """Fill the weights of a layer with NaN."""
    for variable in layer.trainable_weights:
        variable.assign(np.full(variable.shape, np.nan, "float32"))


def compare_precisions(program: Program) -> str:
    """The model in float32 against mixed_float16."""
    model, x, y = program.replayed(made(program))
    with untouched(model):
        report = kmp.debug.compare_precisions(model, x, y)
    assert str(report) and report.rows, "no layer was compared"
    assert not np.isnan(report.output_sqnr), "output SQNR is NaN"
    return f"{report.output_sqnr:.0f} dB, {len(report.rows)} calls"


def diagnose(program: Program) -> str:
    """Which layers have to stay in float32; the model trains under the map, as the report says."""
    model, x, y = program.replayed(made(program))
    with untouched(model):
        report = kmp.debug.diagnose(model, x, y)
    assert str(report)
    assert report.sqnr >= report.target_sqnr, f"ends with {report.sqnr:.0f} dB"
    how = ""
    if report.without_path:
        how = ", converted"
        model = made(program, wrap=kmp_scaled)
        kmp.to_mixed_precision(model, report.policy)
    else:
        model = made(program, report.policy, kmp_scaled)
    losses = fitted(model, program, 2)
    assert np.isfinite(losses).all(), f"under the map, losses {losses}"
    return f"{report.sqnr:.0f} dB, {len(report.float32_layers)} layers in float32{how}"


def diagnose_by_keras(program: Program) -> None:
    """What the end of it needs: the model under a map of policies."""
    eager_by_keras(program)
    fitted(made(program, keras.dtype_policies.DTypePolicyMap("mixed_float16"), kmp_scaled), program)


def memory_report(program: Program) -> str:
    """The bytes of a step in three precisions."""
    model, x, _ = program.replayed(made(program))
    with untouched(model):
        report = kmp.debug.memory_report(model, BATCH, x)
    assert str(report)
    full, mixed, pure = report.rows
    # Sizes of variables, which the model can be asked for too; states of the optimizer are not.
    counted = sum(w.dtype != "uint32" and int(np.prod(w.shape)) * 4 for w in model.weights)
    assert full.parameters >= counted > pure.parameters > 0, f"{full.parameters} of {counted}"
    return f"{full.total / 1024:.0f}, {mixed.total / 1024:.0f}, {pure.total / 1024:.0f} KiB"

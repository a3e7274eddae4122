"""Which layers have to stay in float32, and which loss scale fits."""

import dataclasses
import math
from typing import Any

import keras

from kmp._backend.types import Tree
from kmp._common import number, table
from kmp.debug.policies import policy_for
from kmp.debug.preserved import Preserved
from kmp.debug.ranges import LayerRange, ranges_of
from kmp.debug.replay import Batch, Loss, as_batch, call_model, check_replayable
from kmp.debug.search import Search
from kmp.debug.stats import has_nonfinite, measure, sqnr_of
from kmp.precision.temporary import under
from kmp.precision.trees import HALF_DTYPES


@dataclasses.dataclass(frozen=True, eq=False)
class Diagnosis:
    """What half precision does to a model, and what to do; see `diagnose`.

    Attributes:
        policy: a `keras.dtype_policies.DTypePolicyMap` by `layer.path`, or by the name of a layer
            to which Keras gives no path.
        float32_layers: the paths of the layers that stay in float32, with what is inside of them.
        without_path: the names of those among them to which Keras gives no path (pooling,
            activations, dropout). `kmp.to_mixed_precision(model, policy)` keeps them in float32; a
            rebuilt model does not find them: give them `dtype="float32"` there.
        sqnr: dB of the model's output under `policy`, measured.
        sqnr_before: dB with all layers in half precision.
        target_sqnr: dB that were asked for.
        loss_scale: the advised loss scale for float16, a power of two; None without targets.
        gradients_finite: whether all gradients are finite under `policy` with that scale; None
            without targets.
        ranges: for each call of a layer what its numbers would become in half precision.

    Example:

    >>> policy = keras.dtype_policies.DTypePolicyMap("mixed_float16")
    >>> print(Diagnosis(policy, (), (), 60.0, 60.0, 40.0, 1024.0, True, ()))
    mixed_float16 everywhere: output SQNR 60.0 dB (asked for 40 dB)
    advised loss scale 1024: all gradients finite
    """

    policy: keras.dtype_policies.DTypePolicyMap
    float32_layers: tuple[str, ...]
    without_path: tuple[str, ...]
    sqnr: float
    sqnr_before: float
    target_sqnr: float
    loss_scale: float | None
    gradients_finite: bool | None
    ranges: tuple[LayerRange, ...]

    def __str__(self) -> str:
        name = self.policy.default_policy.name
        kept = f" but for {', '.join(self.float32_layers)}" * bool(self.float32_layers)
        before = ", does not run without them"
        if not math.isnan(self.sqnr_before):
            before = f", {self.sqnr_before:.1f} dB without them"
        before *= bool(self.float32_layers)
        head = (
            f"{name} everywhere{kept}: output SQNR {self.sqnr:.1f} dB (asked for "
            f"{self.target_sqnr:g} dB{before})"
        )
        lines = [head]
        if self.without_path:
            names = ", ".join(self.without_path)
            lines.append(
                f"Keras gives no path to {names}: kmp.to_mixed_precision(model, report.policy) "
                "keeps them in float32; a rebuilt model needs the same names, and dtype='float32' "
                "there"
            )
        if self.loss_scale is not None:
            finite = "all gradients finite" if self.gradients_finite else "some gradients overflow"
            lines.append(f"advised loss scale {self.loss_scale:g}: {finite}")
        titles = [f"{d} {c}" for d in ("fp16", "bf16") for c in ("over", "lost", "degr")]
        if self.ranges:
            rows = [_cells(r.path, r.max_abs, r.activations) for r in self.ranges]
            lines.append(table([["output of", "max |y|", *titles], *rows]))
        rows = [_cells(r.path, r.max_gradient, r.gradients) for r in self.ranges if r.gradients]
        if rows:
            lines.append(table([["gradient at", "max |g|", *titles], *rows]))
        return "\n".join(lines)


def _cells(path: str, largest: float, shares: dict[str, Any]) -> list[str]:
    values = [v for dtype in HALF_DTYPES for v in dataclasses.astuple(shares[dtype])]
    return [path, f"{largest:.3g}", *(f"{v:.2%}" for v in values)]


def diagnose(
    model: keras.Model,
    x: Tree,
    y: Tree = None,
    policy: str | None = None,
    target_sqnr: float = 40.0,
    verbose: int = 0,
) -> Diagnosis:
    """Find the fewest layers that have to stay in float32, and the loss scale that fits.

    One float32 pass says which share of each layer's activations and gradients would overflow, be
    lost or be degraded in float16 and in bfloat16. Then the layers are tried: each alone in half
    precision, to rank them by what they cost the output; all in half precision but for the worst
    one, two, three, until the output has `target_sqnr`; and without each of those again, so that
    none is kept that could go. With targets, layers that raise in training or whose gradients
    overflow at the advised loss scale are kept too. The map is run before it is returned: `sqnr` is
    measured.

    Use the map with `kmp.to_mixed_precision(model, report.policy)`; or with
    `keras.config.set_dtype_policy(report.policy)` before the model is rebuilt under the same
    names, with `kmp.scaled(optimizer)`, since Keras scales no loss under a map.

    A layer changes precision together with the layers in it. All runs are eager, and everything is
    put back. There is one run for each layer, and there are a few more.

    Args:
        model: a built model whose output in float32, or the loss of it, is finite; compiled, if
            `y` is given.
        x: one batch, as `fit` takes it.
        y: its targets, for the gradients of the compiled loss.
        policy: the policy of the other layers, "mixed_float16" or "mixed_bfloat16". By default the
            half precision that the model computes in, and "mixed_float16" for a float32 model.
        target_sqnr: dB that the model's output, in inference mode, is to have against float32. A
            single rounding leaves 74 dB in float16 and 56 dB in bfloat16.
        verbose: 1 shows a progress bar.

    Returns:
        A `Diagnosis`; print it.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: the model is not built, has no `call`, is not compiled although `y` is given, or
            has outputs in float32 that are not finite or not floats; `policy` does not compute in
            half precision; `target_sqnr` is not a number.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((4,)),
    ...     keras.layers.Dense(4, name="a"),
    ...     keras.layers.Lambda(lambda x: (x + 3000) - 3000, name="rough"),
    ...     keras.layers.Dense(2, name="b"),
    ... ])
    >>> report = diagnose(model, np.ones((2, 4)), policy="mixed_bfloat16", target_sqnr=30)
    >>> report.float32_layers, report.sqnr > 30
    (('sequential.../rough',), True)
    >>> report.policy[model.get_layer("rough").path].compute_dtype
    'float32'

    Source: the range histograms of Micikevicius et al., "Mixed Precision Training" (2018), fig. 2.
    """
    check_replayable(model, "diagnose", with_loss=y is not None)
    policy = policy_for(model, policy)
    target_sqnr = number("target_sqnr", target_sqnr, "diagnose")
    batch = (as_batch(x), as_batch(y), None)
    with Preserved(model) as preserved:
        with under(model, "float32"):
            outputs = call_model(model, batch[0], training=False)
            _check_finite(model, batch, outputs)
            ranges, scale = ranges_of(model, batch, y is not None, preserved)
        search = Search(model, batch, outputs, policy, target_sqnr, preserved)
        search.keep_for_the_output(verbose)
        finite = None
        if scale is not None:
            used = scale if search.dtype == "float16" else 1.0
            finite = search.keep_for_the_gradients(used)
        return Diagnosis(
            policy=search.policies(),
            float32_layers=tuple(unit.path for unit in search.kept),
            without_path=tuple(layer.name for layer in search.without_path()),
            sqnr=search.sqnr(),
            sqnr_before=search.before,
            target_sqnr=target_sqnr,
            loss_scale=scale,
            gradients_finite=finite,
            ranges=tuple(ranges),
        )


def _check_finite(model: keras.Model, batch: Batch, outputs: Tree) -> None:
    """Raise ValueError if neither outputs nor loss is finite: a loss may know the masks in them."""
    x, y, sample_weight = batch
    if has_nonfinite(measure(outputs)):
        loss = None if y is None else Loss(model)(x, y, outputs, sample_weight, training=False)
        if loss is None or has_nonfinite(measure(loss)):
            raise ValueError(
                "`model` of diagnose must be finite in float32. Received: a batch for which its "
                "output is not. kmp.debug.locate_nonfinite(model, x, y) names the layer. If the "
                "output is a mask of -inf, pass a y for which the loss is finite."
            )
    if math.isnan(sqnr_of(outputs, outputs)):
        raise ValueError(
            "`model` of diagnose must have finite float outputs and no NaN in float32, so that "
            "half precision can be compared with them. Received: outputs "
            f"{', '.join(map(str, measure(outputs))) or 'without floats'}. Write -inf instead of "
            "NaN for what is masked."
        )

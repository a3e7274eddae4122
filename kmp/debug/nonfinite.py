"""Which layer was the first to leave the range, forward or backward, and why."""

import dataclasses

import keras

from kmp._backend.types import Tensor, Tree
from kmp._common import scale_number
from kmp._keras import layers_of, path_of
from kmp._keras.calls import Call
from kmp._keras.state import added_losses
from kmp.debug.blame import (
    Blame,
    Cotangents,
    first_bad_value,
    first_nan_weights,
    is_in_loss,
    maker_of,
)
from kmp.debug.causes import backward_cause, forward_cause, term_cause
from kmp.debug.preserved import Preserved
from kmp.debug.replay import Batch, as_batch, backward, check_replayable, forward, loss_scale_of
from kmp.debug.stats import TensorStats, has_nonfinite, measure
from kmp.debug.terms import first_bad_term
from kmp.precision.temporary import under


@dataclasses.dataclass(frozen=True)
class NonfiniteReport:
    """The first place that is not finite; see `locate_nonfinite`.

    Attributes:
        phase: "forward", "loss" or "backward"; None if everything is finite.
        path: `layer.path` of the layer to blame, with the number of the call if it is not the
            name's first; None if no layer is.
        part: where in it: "layer" (its computation), "code" (its own code around its children),
            "cast" (of its inputs to its compute dtype), "weights" (the reduction to the gradients
            of its variables alone), "add_loss" (what it adds to the loss), "regularizer" (of the
            variable that `variables` names), "data" (the batch itself), "loss", or "model" (nothing
            smaller was found).
        dtype: what the layer computes in; None without a layer.
        after: path of the child after which the code went wrong, in the order of execution.
        before: path of the child before which it did.
        inputs: statistics of what came in: forward the inputs, backward the incoming gradients.
        outputs: statistics of what came out, the first that is not finite.
        variables: paths of the variables whose gradients, or regularizers, are not finite.
        cause: what is known about why, in words.
        loss_scale: what the loss was multiplied by; None if only the forward pass was run.

    Example:

    >>> print(NonfiniteReport(loss_scale=1024.0))
    Every value and every gradient of this batch is finite at loss scale 1024.
    """

    phase: str | None = None
    path: str | None = None
    part: str | None = None
    dtype: str | None = None
    after: str | None = None
    before: str | None = None
    inputs: tuple[TensorStats, ...] = ()
    outputs: tuple[TensorStats, ...] = ()
    variables: tuple[str, ...] = ()
    cause: str = ""
    loss_scale: float | None = None

    def __str__(self) -> str:
        if self.phase is None:
            if self.loss_scale is None:
                return (
                    "Every value of this batch is finite in the forward pass. The loss and its "
                    "gradients were not looked at: for them pass `y`."
                )
            return (
                "Every value and every gradient of this batch is finite at loss scale "
                f"{self.loss_scale:g}."
            )
        lines = [f"{self.phase.upper()}: {self._what()}"]
        lines += [f"  in:    {s}" for s in self.inputs] + [f"  out:   {s}" for s in self.outputs]
        if self.variables and self.part != "regularizer":
            more = f" and {len(self.variables) - 5} more" * (len(self.variables) > 5)
            lines.append(f"  gradients not finite: {', '.join(self.variables[:5])}{more}")
        return "\n".join([*lines, f"  cause: {self.cause}"] if self.cause else lines)

    def _what(self) -> str:
        if self.part == "loss":
            what = "the gradient is not finite where it leaves the loss"
            if self.phase == "loss":
                what = "the outputs are finite, the loss is not"
            return what + (f": its code {self._places()}" if self._places() else "")
        if self.part == "add_loss":
            return f"what {self.path} adds to the loss, by add_loss or an activity regularizer"
        if self.part == "regularizer":
            return f"the regularizer of {self.variables[0]}"
        if self.part == "data":
            return "the batch itself is not finite"
        if self.path is None:
            return (
                "the outputs"
                if self.part == "model"
                else "gradients of variables that belong to no layer"
            )
        layer = f"{self.path} ({self.dtype})"
        if self.part == "weights":
            return f"the reduction to the gradients of the weights of {layer}"
        if self.part == "cast":
            return f"the cast of the inputs of {layer}"
        if self.part == "code":
            return f"the code of {layer} itself, {self._places()}"
        return layer

    def _places(self) -> str:
        places = [f"after {self.after}"] * bool(self.after)
        places += [f"before {self.before}"] * bool(self.before)
        return " and ".join(places)


def locate_nonfinite(
    model: keras.Model,
    x: Tree,
    y: Tree = None,
    sample_weight: Tree = None,
    loss_scale: float | None = None,
) -> NonfiniteReport:
    """Name the first layer, forward or backward, whose output or gradient leaves the range.

    Replays one batch, eagerly: forward as in training, then, if `y` is given, backward from the
    compiled loss times the loss scale. If a later layer or the loss turns inf or NaN into finite
    numbers, as it does with a mask of -inf, they count as intended, unless they come from weights
    of NaN. The layer to blame is run once more in float32, to tell a number that is too large for
    its dtype from one that is wrong in any dtype. The model may be Sequential, functional or
    subclassed, with nested and shared layers. Everything is put back, even when the model raises:
    weights, statistics, metrics, the optimizer, dtype policies, random states.

    Call it with the batch and the weights of the step that overflowed (after a skipped step the
    model still has those weights). XLA may keep float32 inside what it fuses: a replay can overflow
    where the compiled step does not, and the other way round. For scans (an RNN on JAX) and other
    compiled code, the layer around them is named.

    Args:
        model: a built model; compiled, if `y` is given.
        x: one batch, as `fit` takes it: an array or a nested structure of arrays.
        y: its targets; None looks only at the forward pass.
        sample_weight: its weights, if there are any.
        loss_scale: by default what the optimizer would multiply the loss with now.

    Returns:
        A `NonfiniteReport`; print it.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: the model is not built, has no `call`, or is not compiled although `y` is given;
            `loss_scale` cannot be a loss scale.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((4,)),
    ...     keras.layers.Dense(4, kernel_initializer="ones", name="fine", dtype="mixed_float16"),
    ...     keras.layers.Rescaling(300.0, name="loud", dtype="mixed_float16"),
    ... ])
    >>> print(locate_nonfinite(model, np.full((1, 4), 100.0)))
    FORWARD: ...loud (float16)
      in:    float16[1, 4] on ..., from 400 to 400
      out:   float16[1, 4] on ..., 4 inf
      cause: finite in float32 (largest 1.2e+05): it left float16 (at most 65504). ...
    """
    check_replayable(model, "locate_nonfinite", with_loss=y is not None)
    if loss_scale is not None:
        loss_scale = scale_number("loss_scale", loss_scale, "locate_nonfinite")
    batch = (as_batch(x), as_batch(y), as_batch(sample_weight))
    with Preserved(model) as preserved:
        if y is None:
            blame = first_blame(model, batch, None, preserved)
            return _report(blame, _cause(model, batch, blame, 1.0, preserved), None)
        scale = loss_scale_of(model) if loss_scale is None else loss_scale
        blame = first_blame(model, batch, scale, preserved)
        return _report(blame, _cause(model, batch, blame, scale, preserved), scale)


def first_blame(
    model: keras.Model, batch: Batch, scale: float | None, preserved: Preserved
) -> Blame | None:
    """Replay a batch; the first place that is not finite, None if there is none.

    Args:
        model: the model, under the dtype policies that are to be looked at.
        batch: x, y and sample_weight, as tensors.
        scale: the loss scale; None for only the forward pass.
        preserved: what puts the state back before each replay.
    """
    preserved.restore()
    recorder, outputs, loss = forward(model, batch, training=True, with_loss=scale is not None)
    term = first_bad_term(model)
    preserved.restore()  # statistics of layers have taken in what is to be explained
    if blame := first_nan_weights(recorder.calls):
        return blame
    if term or has_nonfinite(measure(outputs if loss is None else loss)):
        calls = recorder.calls
        if not (term or has_nonfinite(measure(outputs))):  # then the model is not to blame
            calls = [call for call in calls if is_in_loss(call)]
        return first_bad_value(calls) or term or _end(recorder.calls, outputs, loss)
    if scale is None:
        return None
    preserved.restore()
    cotangents = Cotangents()
    keys = {call.key for call in recorder.calls}
    loss, gradients = backward(model, batch, scale, keys, cotangents.record)
    if has_nonfinite(measure(loss)):
        return dataclasses.replace(_end(recorder.calls, outputs, loss), scaled=True)
    return cotangents.first_bad(gradients, model.trainable_variables)


def _end(calls: list[Call], outputs: Tree, loss: Tensor | None) -> Blame:
    """What is left where no call is to blame: the loss, or without one the outputs."""
    if loss is None:
        return Blame("forward", None, "model", outputs=measure(outputs))
    after = maker_of(calls, outputs)
    return Blame("loss", None, "loss", after, inputs=measure(outputs), outputs=measure(loss))


def _cause(
    model: keras.Model, batch: Batch, blame: Blame | None, scale: float, preserved: Preserved
) -> str:
    if blame is None:
        return ""
    if blame.phase == "loss":
        if blame.owner:
            return _term_cause(model, batch, blame, preserved)
        if blame.scaled:
            return f"the outputs are finite, and the loss times {scale:g} is not"
        return _loss_cause(model, batch, blame.after, preserved)
    if blame.phase == "forward":
        return forward_cause(blame)
    preserved.restore()
    in_float32 = Cotangents()
    with under(model, "float32"):
        keys = {blame.place.key} if blame.place else set()
        _, gradients = backward(model, batch, scale, keys, in_float32.record)
    return backward_cause(blame, in_float32, gradients, model.trainable_variables, scale)


def _loss_cause(model: keras.Model, batch: Batch, after: Call | None, preserved: Preserved) -> str:
    """Why the code of a loss makes what is not finite of what layers return."""

    def is_finite_with(layer):
        preserved.restore()
        try:
            with under(layer, "float32"):
                *_, loss = forward(model, batch, training=True, with_loss=True)
        except Exception:  # TensorFlow mixes no dtypes
            return None
        return loss is not None and not has_nonfinite(measure(loss))

    in_float32 = is_finite_with(model)
    if in_float32 is None:
        return "the loss itself is not finite, not by being scaled: no loss scale can help"
    if not in_float32:
        return "the loss is not finite in float32 either: no loss scale can help"
    if after is None or not is_finite_with(after.layer):
        return "finite where all layers compute in float32: kmp.debug.diagnose tries each of them"
    return (
        "finite in float32: the code of the loss computes with what that layer returns in half "
        "precision. Keep the layer in float32 (dtype='float32')."
    )


def _term_cause(model: keras.Model, batch: Batch, blame: Blame, preserved: Preserved) -> str:
    if blame.part == "regularizer":  # of weights, in whatever precision the layer computes
        return term_cause(blame, "", ())
    layer = next(x for x in layers_of(model) if path_of(x) == blame.owner)
    dtype = layer.compute_dtype
    preserved.restore()
    with under(model, "float32"):
        forward(model, batch, training=True)
        return term_cause(blame, dtype, measure(added_losses(layer)))


def _report(blame: Blame | None, cause: str, scale: float | None) -> NonfiniteReport:
    if blame is None:
        return NonfiniteReport(loss_scale=scale)
    call = blame.call
    return NonfiniteReport(
        phase=blame.phase,
        path=call.path if call else blame.owner or None,
        part=blame.part,
        dtype=call.dtype if call else None,
        after=blame.after.path if blame.after else None,
        before=blame.before.path if blame.before else None,
        inputs=blame.inputs,
        outputs=blame.outputs,
        variables=blame.variables,
        cause=cause,
        loss_scale=scale,
    )

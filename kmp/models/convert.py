"""Convert a model that exists to mixed precision: the same object and weights, other dtypes."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
from keras import Model
from keras.dtype_policies import DTypePolicyMap
from keras.layers import InputLayer, Wrapper

from kmp._backend.types import Tensor, Variable
from kmp._keras import (
    call_in_training,
    check_model,
    forget_functions,
    give_policies,
    is_graph,
    is_preprocessing,
    layers_of,
    own_weights,
    parts_of,
    path_of,
    symbolic_outputs,
    takes_training,
)
from kmp._keras.calls import Recorder, recording
from kmp.models.indices import (
    INSIDE,
    LESS_GRAVE,
    NEEDS_INTEGERS,
    NORMALIZED,
    RAW_INPUTS,
    REASONS,
    Rounding,
    normalizes,
    roundings,
)
from kmp.models.optimizers import Rebuilding, compiled_models, scale_losses
from kmp.models.output_layers import called_models, output_layers
from kmp.models.policies import remember_policies
from kmp.models.pooling import ADDS_UP_IN_HALF, error_of_averages
from kmp.models.programs import Program
from kmp.models.recurrence import ADDS_UP_STEPS, adds_up_steps
from kmp.models.report import ConversionReport, LayerConversion, policy_word
from kmp.models.retype import dtype_changes, float32_weights, give_initializers, retype
from kmp.models.side_effects import ROUNDED_STATE, harmed_layers, told_of_models
from kmp.precision.policy import Policy, get_policy, on_weights, plain
from kmp.precision.trees import HALF_DTYPES, half_dtype

Plan: TypeAlias = list[tuple[keras.Layer, Any, str]]  # layers, their new policies, and why

RAISES = "raises in half precision"


def to_mixed_precision(
    model: Model,
    policy: Any = None,
    filter_fn: Callable[[keras.Layer, str], bool] | None = None,
) -> ConversionReport:
    """Convert a built model to another precision: what it computes in, and what its weights are in.

    The model is converted in place, including wrapped layers, RNN cells and nested models. Under a
    policy such as `"mixed_bfloat16"` the weights stay in float32; under `"bfloat16"` they become
    bfloat16, as do the optimizer's slots, unless `kmp.scaled` was told otherwise. These layers stay
    in float32, and the report gives the reason for each:

    - output layers: the last layers with weights before each output, and all layers after them,
      because logits and softmax need float32. If the policy names an output dtype, they compute in
      that dtype. A layer that has an output layer inside it computes in the same dtype: for
      example one layer of word and position embeddings, if the logits come from the former;
    - preprocessing layers (`Normalization`, `Rescaling`, augmentation), because raw inputs may be
      beyond the range of half precision;
    - layers that raise in half precision, as a module of PyTorch in a Keras model does, or code
      that multiplies its inputs by float32 on TensorFlow;
    - layers with an activity regularizer, and those that call `add_loss`, because Keras sums both
      in half precision;
    - average pooling over so many numbers that the average is wrong by more than 3%, because this
      machine adds them up in half precision. This is tried; on JAX's CPUs in bfloat16, 14 by 14
      pixels are too many;
    - a `GRU`, and on PyTorch an `LSTM`, that returns the outputs of more than 256 steps (2048 under
      float16), if Keras's fast code for it adds up the gradients of the steps in half precision.
      This is tried; the gradients of the first steps would be lost. `use_cudnn=False` chooses other
      code;
    - under float16, layers that add up 256 squares or more, as `UnitNormalization` does: beyond
      65504 the sum is inf, and what is divided by its root becomes 0. A layer that has more weights
      than squares computes in float16, and `kmp.audit` says what to do;
    - layers that decompose matrices or signals, by `keras.ops.cholesky`, `eigh`, `inv`, `fft` and
      the like, which not each backend can in half precision;
    - layers that update variables of theirs when they are called, such as a moving average or
      `SpectralNormalization`, because Keras would hand them the variables rounded;
    - layers that carry indices. An `Embedding`, a one-hot vector, a gather, a table or any other
      cast to integers may get its indices as floats, through a `Reshape`, a `Lambda` or a layer of
      your own, and half precision would round them there. The same goes for positions that a layer
      counts itself, and for three kinds of raw inputs: those that a layer such as `Masking`
      compares with a number other than 0 or with each other; those on their way to a preprocessing
      layer; and those from which something is subtracted: their mean by a `BatchNormalization`, or
      anything by a layer without weights. Any other such layer that has weights, or is the model
      itself, computes in half precision all the same, but on inputs that are not cast: the report
      says `i=uncast`. If its code mixes dtypes that TensorFlow does not multiply, it stays in
      float32 with the layers in it;
    - layers that `filter_fn` excludes, with all layers inside them.

    Normalization layers and layers with state of their own, such as moving averages, compute in
    half precision and keep their weights in float32; so do the adapters of LoRA.

    A compiled model stays compiled. Under float16 its optimizer is wrapped in loss scaling, with
    its state, unless it scales the loss already; other optimizers that the model holds, such as
    those of a GAN, are named in the report. Where weights change their dtype, each optimizer is
    replaced by one with slots for them, with its state: `model.optimizer` is another object then.
    Functions that Keras has compiled are dropped.

    The converted model is called with symbolic inputs, in inference and in training, so that an
    error shows now. The report says so if Keras cannot do that. A model without `call` is converted
    and tried by its parts.

    Saved files keep the policies. If your own code creates layers, `import kmp` before loading.
    A converted model can be converted again, to another policy or back to `"float32"`.

    Args:
        model: built `keras.Model`: Sequential, Functional or subclassed.
        policy: what `kmp.get_policy` takes; `"mixed_"` + `kmp.half_dtype()` if left out;
            `"autocast"` for a model that follows `kmp.autocast`; or a `DTypePolicyMap` with entries
            in float32, such as that of `kmp.debug.diagnose`.
        filter_fn: called with each layer and its path; a layer stays in float32 if it returns
            False.

    Returns:
        `ConversionReport`, one row a layer; the model is the same object.

    Raises:
        TypeError: if `model` is not a Keras model.
        ValueError: if the model is not built, has quantized layers or weights in float64, or could
            not be called any more; if `policy` is a map with entries other than float32 and its
            default; if the optimizer has state and cannot be made anew from its config for weights
            of another dtype. Nothing is converted then.

    Example:

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    >>> report = to_mixed_precision(model, "mixed_bfloat16")
    >>> [layer.compute_dtype for layer in model.layers]
    ['bfloat16', 'float32']
    >>> list(report.kept.values())
    ['output layer']

    Source: torchao's `convert_to_float8_training` for the filter, Micikevicius et al. 2018 for
    what stays in float32.
    """
    filters = [] if filter_fn is None else [(filter_fn, "excluded by filter_fn")]
    if isinstance(policy, DTypePolicyMap):
        filters.append((_converted_by(policy), "float32 in the map"))
        policy = policy.default_policy
    policy = get_policy(f"mixed_{half_dtype()}" if policy is None else policy)
    _check(model, policy)
    before = {id(layer): layer.dtype_policy for layer in layers_of(model)}
    compiled = compiled_models(model)
    plan, rebuilds, untried = _convert_what_runs(model, policy, filters, compiled)
    said = [rebuild() for rebuild in rebuilds]
    forget_functions(model)
    remember_policies(model)
    rows = [
        LayerConversion(
            path_of(layer),
            type(layer).__name__,
            policy_word(before[id(layer)]),
            policy_word(new),
            why,
        )
        for layer, new, why in plan
    ]
    said += [scale_losses(each, policy, of) for of, each in compiled.items()]
    optimizer = "\n".join(filter(None, said))
    rounded = told_of_models(Program(model)) if policy.compute_dtype in HALF_DTYPES else ""
    return ConversionReport(tuple(rows), optimizer, untried, rounded)


def _convert_what_runs(
    model: Any, policy: Policy, filters: list[tuple[Callable, str]], compiled: Mapping[str, Model]
) -> tuple[Plan, list[Rebuilding], str]:
    """Convert all but the layers that raise in half precision; each of them costs one more try.

    Returns:
        The plan that was carried out; the optimizers that are to be rebuilt; and why the model was
        not called.

    Raises:
        ValueError: if the model cannot be called any more. It is as before then.
    """
    raising: list[keras.Layer] = []
    filters = [*filters, (lambda layer, path: all(layer is not x for x in raising), RAISES)]
    while True:
        plan = _plan(model, policy, filters, _exact_layers(model, policy, filters))
        changes = [
            change
            for layer, new, _ in plan
            for change in dtype_changes(layer, new, policy.param_dtype)
        ]
        rebuilds = [Rebuilding(x, policy, of) for of, x in compiled.items()] if changes else []
        exact = {key: value for each in rebuilds for key, value in each.exact.items()}
        untried, raised = _convert(model, policy, plan, changes, exact)
        if raised is None:
            return plan, rebuilds, untried
        if any(raised is x for x in raising):  # it is inside an output layer, in that one's dtype
            raise ValueError(_mixed_dtypes(model, policy))
        raising.append(raised)


def _convert(
    model: Any,
    policy: Policy,
    plan: Plan,
    changes: list[tuple[Variable, str]],
    exact: dict[int, Tensor],
) -> tuple[str, keras.Layer | None]:
    """Change policies and weights, and call the model symbolically.

    Returns:
        Why it was not called, if that is impossible; and a layer that raises in half precision
        alone. If there is one, the model is as before.

    Raises:
        ValueError: if the model cannot be called any more. It is as before then.
    """
    before = [(layer, layer.dtype_policy) for layer in layers_of(model)]

    def convert() -> Callable[[], None]:
        put_back = retype(changes, exact)
        _give([(layer, new) for layer, new, _ in plan])

        def undo() -> None:
            put_back()
            _give(before)

        return undo

    called = called_models(model)
    ways = [(each, call) for each in called for call in _calls(each)]
    undo = convert()
    try:
        failed = [way for way in ways if symbolic_outputs(*way) is None]
        if failed:
            now = [_attempts(*way) for way in failed]
            undo()
            ran = [
                recorder
                for way, recorded in zip(failed, now, strict=True)
                for (recorder, _), (_, had_run) in zip(recorded, _attempts(*way), strict=False)
                if had_run
            ]
            if ran:
                if (layer := _raising_layer(ran[0], plan)) is None:
                    raise ValueError(_mixed_dtypes(model, policy))
                return "", layer
            undo = convert()
    except Exception:
        undo()
        raise
    tried = {id(each) for each, call in ways if all(call is not other for _, other in failed)}
    if called and all(id(each) in tried for each in called):
        return "", None
    return (
        f"{model.name!r} was not tried in {policy}, because Keras cannot call it without data. "
        "Call it on a batch: if it raises, one of its layers mixes dtypes that do not go together."
    ), None


def _attempts(model: Any, call: Callable) -> list[tuple[Recorder, bool]]:
    """The symbolic calls that are tried: what each calls, and whether it comes to its end."""
    found: list[tuple[Recorder, bool]] = []

    def recorded(*inputs: Any) -> Any:
        recorder = Recorder()
        found.append((recorder, False))
        with recording(recorder):
            outputs = call(*inputs)
        found[-1] = recorder, True
        return outputs

    symbolic_outputs(model, recorded)
    return found


def _raising_layer(recorder: Recorder, plan: Plan) -> keras.Layer | None:
    """The innermost half layer in whose code something raised; None if it is a model."""
    half = {id(layer) for layer, new, _ in plan if new != Policy("float32")}
    raised = recorder.raised()
    while raised is not None and id(raised.layer) not in half:
        raised = raised.parent
    return None if raised is None or isinstance(raised.layer, Model) else raised.layer


def _mixed_dtypes(model: Any, policy: Policy) -> str:
    return (
        f"{model.name!r} cannot be called in {policy}: its own code, or that of a model in it, "
        "mixes dtypes that do not go together. Nothing was converted. Let it combine them by "
        "keras.ops, such as keras.ops.multiply(a, b) for a * b; or exclude the layers that it "
        "takes them from, for example with filter_fn=lambda layer, path: layer.name != 'its_name'."
    )


def _give(policies: list[tuple[keras.Layer, Any]]) -> None:
    give_policies((layer, plain(policy)) for layer, policy in policies)
    for layer, policy in policies:
        give_initializers(layer, policy)


def _calls(model: Any) -> list[Callable]:
    """How a model is called: in inference, and in training if it tells the two apart."""
    # Both look up `call` only when they run: by then it may be one that casts its inputs.
    calls: list[Callable] = [lambda *inputs: model.call(*inputs)]
    if takes_training(model):
        calls.append(functools.partial(call_in_training, model))
    return calls


def _check(model: Any, policy: Policy) -> None:
    check_model(model, "to_mixed_precision")
    quantized = [path_of(x) for x in layers_of(model) if x.quantization_mode is not None]
    if quantized:
        raise ValueError(
            "Quantized layers cannot change their policy. Received: "
            f"{quantized[0]!r} and {len(quantized) - 1} more quantized layers. Convert the model "
            "before model.quantize(...)."
        )
    wide = [path_of(x) for x in layers_of(model) if own_weights(x) and _is_float64(x)]
    if wide or policy.param_dtype == "float64":
        raise ValueError(
            "Weights in float64 are not converted, neither from nor to it. Received: "
            f"policy={str(policy)!r} for a model whose weights are float64 in {wide or 'no layer'}."
            ' Write for example "mixed_bfloat16" for a model that is built in float32.'
        )


def _is_float64(layer: keras.Layer) -> bool:
    return layer.variable_dtype == "float64"


def _converted_by(policy_map: Any) -> Callable[[keras.Layer, str], bool]:
    """A `filter_fn` that excludes the layers that a map keeps in float32."""

    def filter_fn(layer, path):
        policy = get_policy(policy_map[path])
        if policy not in (Policy("float32"), get_policy(policy_map.default_policy)):
            raise ValueError(
                "The entries of a map must be float32 or its default. Received: "
                f"{policy_map.default_policy.name!r} by default and {str(policy)!r} for {path!r}. "
                "Nothing was converted. Convert to one half precision at a time."
            )
        return policy != Policy("float32")

    return filter_fn


def _exact_layers(
    model: Any, policy: Policy, filters: list[tuple[Callable, str]]
) -> dict[int, Rounding]:
    """The layers that must not round what they carry, by their ids.

    They are found in the converted model, with its weights as they are: convert, look what is
    rounded, and look again, for a layer whose inputs are not cast may still cast by itself.
    """
    exact: dict[int, Rounding] = {}
    given_up: set[int] = set()  # what rounds raw inputs all the same
    half = Policy(policy.param_dtype, half_dtype()) if policy.adapts else policy
    before = [(layer, layer.dtype_policy) for layer in layers_of(model)]
    # Nobody knows whether these get their indices as floats or as integers.
    unknown = {id(each) for each in called_models(model) if not is_graph(each)}
    try:
        while half.compute_dtype in HALF_DTYPES:
            plan = _plan(model, half, filters, exact)
            changed = [(layer, new) for layer, new, _ in plan if isinstance(new, Policy)]
            _give([(layer, on_weights(new, layer.variable_dtype)) for layer, new in changed])
            program = Program(model)
            looked = roundings(program)
            less_grave = {key for key, each in exact.items() if each.why in LESS_GRAVE}
            if looked is None and less_grave:
                given_up |= less_grave
                exact = {key: each for key, each in exact.items() if key not in less_grave}
                continue
            found = {id(each.layer): each for each in looked or ()}
            found = {k: x for k, x in found.items() if x.why not in LESS_GRAVE or k not in given_up}
            harmed = harmed_layers(program) if not exact else {}
            if not exact and unknown.intersection(found):
                unknown -= {id(each.layer) for each in roundings(program, certain=True) or ()}
            if looked is None:  # its code cannot do with inputs that are not cast
                casting = {key: each for key, each in exact.items() if key in unknown}
                casting = {k: each for k, each in casting.items() if each.why != NEEDS_INTEGERS}
                why = NEEDS_INTEGERS if casting else INSIDE
                mixing = casting or {key: each for key, each in exact.items() if _mixes(each)}
                found = {key: each._replace(why=why) for key, each in mixing.items()}
            found |= harmed
            settled = {key for key, each in exact.items() if each.why == NEEDS_INTEGERS}
            new = {key: each for key, each in found.items() if key not in settled}
            if new.items() <= exact.items():
                break
            exact.update(new)
    finally:
        _give(before)
    return exact


def _mixes(rounding: Rounding) -> bool:
    """Whether the code of a layer may compute with what is exact and with half weights."""
    return bool(rounding.layer.weights) and not isinstance(rounding.layer, Model)


def _plan(
    model: Any,
    policy: Policy,
    filters: list[tuple[Callable, str]],
    exact: Mapping[int, Rounding],
) -> Plan:
    """Each layer, the policy that it will have, and the reason if that is not `policy`."""
    heads = {id(each) for layer in output_layers(model) for each in layers_of(layer)}
    keep = Policy("float32")
    outputs = Policy(policy.param_dtype, policy.output_dtype) if policy.has_output_dtype else keep
    plan: dict[int, tuple[keras.Layer, Any, str]] = {}

    def visit(layer, kept_with=None):
        path = path_of(layer)
        inner = parts_of(layer)
        new, reason = keep, ""
        if id(layer) in plan or isinstance(layer, InputLayer):
            return
        if not keras.backend.is_float_dtype(layer.compute_dtype):
            new, reason = layer.dtype_policy, f"computes in {layer.compute_dtype}"
        elif policy == keep:
            pass
        elif kept_with is not None:
            new, reason = kept_with[0], f"inside {kept_with[1]}"
        elif is_preprocessing(layer):
            reason = "preprocessing of raw inputs"
        elif excluded := [why for convert, why in filters if not convert(layer, path)]:
            reason = excluded[0]
        elif id(layer) in heads:
            new, reason = outputs, "output layer"
        elif any(id(each) in heads for each in inner) and not isinstance(layer, Model):
            new, reason = outputs, "shares an output layer"
        elif layer.activity_regularizer is not None:
            reason = "activity regularizer"
        elif reason := _wrong_sum(layer, policy):
            pass
        elif any(map(is_preprocessing, inner)) and not is_graph(layer):
            reason = RAW_INPUTS
        elif id(layer) in exact:
            new, reason = _exact(exact[id(layer)], policy)
        else:
            new, reason = _converted(layer, policy)
        plan[id(layer)] = (layer, new, reason)
        alone = not reason or reason.startswith((*REASONS, "float32 weights"))
        alone = alone or (reason == ROUNDED_STATE and isinstance(layer, Wrapper))
        for each in inner:
            visit(each, None if alone else (new, path))

    visit(model)
    return list(plan.values())


def _wrong_sum(layer: keras.Layer, policy: Policy) -> str:
    """What a layer would add up wrongly on this machine, or nothing."""
    half = half_dtype() if policy.adapts else policy.compute_dtype
    if error_of_averages(layer, half):
        return ADDS_UP_IN_HALF
    return ADDS_UP_STEPS if adds_up_steps(layer, half) else ""


def _exact(rounding: Rounding, policy: Policy) -> tuple[Policy, str]:
    """The policy under which a layer does not round what it must not round, and why."""
    converted, _ = _converted(rounding.layer, policy)
    if rounding.why == NEEDS_INTEGERS:
        new = converted
    elif rounding.why == NORMALIZED and normalizes(rounding.layer):
        new = Policy("float32")  # as it computes in any case; Keras loads that without kmp
    elif rounding.layer.weights and not rounding.by_itself and rounding.why != INSIDE:
        new = converted.with_inputs_uncast()
    else:
        new = Policy("float32")
    return new, rounding.why


def _converted(layer: keras.Layer, policy: Policy) -> tuple[Policy, str]:
    """The policy of a layer that computes as `policy` says, and why its weights do not follow."""
    reason = float32_weights(layer) if policy.param_dtype in HALF_DTYPES else ""
    if not reason:
        return policy, ""
    output = policy.output_dtype if policy.has_output_dtype else None
    return Policy("float32", policy.compute_dtype, output), reason

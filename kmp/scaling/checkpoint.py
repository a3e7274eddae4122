"""The optimizer's state in files, and in the terms of `torch.amp.GradScaler`.

kmp stores its own variables by name, and a description of the rule and of the inner optimizer.
Keras stores the inner optimizer's variables next to them. A file is checked completely before
anything is assigned, so a wrong file leaves the live state unchanged.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kmp._backend.types import Variable
from kmp._common import number, scale_number, warn, whole_number
from kmp._keras.optimizer import steps_of, trainable_variables_of
from kmp.half_memory import build_inner
from kmp.health.telemetry import MEASUREMENTS
from kmp.scaling.amax import AmaxLossScale
from kmp.scaling.converted import Layout, is_same_slot, layout_of, to_numpy
from kmp.scaling.converted import load as load_converted
from kmp.scaling.rules import DynamicLossScale, NoOpLossScale, StaticLossScale

_INNER_SIZES = "inner_sizes"
_LAYOUT = "layout"  # older files have only the sizes
# Keras's class numbers its variables: these, then the inner optimizer's.
_KERAS_OWN = ("iteration", "learning_rate", "step_counter", "dynamic_scale")
_UNBUILT = ("iteration", "learning_rate")  # what an optimizer has before it is built
# The others exist only with `measure_gradients` or "drop_window", which may be new since.
_REQUIRED = {*_KERAS_OWN, "skipped_steps", "consecutive_skips"}
STATE_PREFIX = "loss_scale_"  # of what a strategy's state has beside Keras's and kmp 0.1's
_COUNTERS = ("iteration", "step_counter", "skipped_steps", "consecutive_skips")
_OF_RULES = ("growth_factor", "backoff_factor", "growth_interval")  # of a GradScaler, and ours
_TRACKER = "_growth_tracker"  # finite steps since the scale last moved
_GRAD_SCALER_KEYS = ("scale", *_OF_RULES, _TRACKER)


def save_own_variables(optimizer: Any, store: Any) -> None:
    """Store the wrapper's variables by name, and a description of the inner optimizer's."""
    for variable in optimizer.own_variables:
        store[variable.name] = variable.numpy()
    store[_INNER_SIZES] = _sizes(optimizer.inner_optimizer.variables)
    held = layout_of(optimizer)
    layout = {"rule": type(optimizer.loss_scale).__name__, **dataclasses.asdict(held)}
    store[_LAYOUT] = np.frombuffer(json.dumps(layout).encode(), "uint8")


def load_own_variables(optimizer: Any, store: Mapping[str, Any]) -> None:
    """Load state that kmp, Keras's LossScaleOptimizer or the bare inner optimizer stored.

    Raises:
        ValueError: if it is none of these, or of another inner optimizer or model. Nothing is
            changed then.
    """
    sizes = _sizes_before_first_step(store)
    if sizes is not None and (optimizer.built or len(sizes) <= len(_UNBUILT)):
        _load_before_first_step(optimizer, store, sizes)
        return
    keys = set(store.keys())
    if not keys or not optimizer.built:
        reason = "the file holds none."
        if keys:
            reason = (
                "the optimizer is not built yet. To go on from it, write "
                "model.optimizer.build(model.trainable_variables) before model.load_weights(...)."
            )
        warn(f"The state of {optimizer.name!r} is not loaded: {reason}")
        return
    own = {v.name: v for v in optimizer.own_variables}
    inner, rule = optimizer.inner_optimizer.variables, optimizer.loss_scale
    scale = own["dynamic_scale"]
    if "dynamic_scale" in keys:
        layout = _checked_layout(optimizer, store)
        measured = set(MEASUREMENTS) if _is_of_other_weights(optimizer, layout) else set()
        values = [(v, store[name]) for name, v in own.items() if name in keys - measured]
        values += _state_values(optimizer, layout.get("rule", type(rule).__name__), store)
    elif len(keys) == len(inner):
        values = [(v, store[str(i)]) for i, v in enumerate(inner)]
    elif len(keys) == len(_KERAS_OWN) + len(inner):
        values = [(own[name], store[str(i)]) for i, name in enumerate(_KERAS_OWN)]
        values += [(v, store[str(i)]) for i, v in enumerate(inner, start=len(_KERAS_OWN))]
    else:
        raise _mismatch(optimizer, f"{len(keys)} variables", len(inner))
    if "dynamic_scale" not in keys:  # a foreign file: its steps are those that were applied
        values.append((own["iteration"], store[str(len(keys) - len(inner))]))
        _expect_less_of_the_inner(optimizer.inner_optimizer)
    values = [(v, _within_bounds(rule, x) if v is scale else x) for v, x in values]
    _assign_all(optimizer, values)


def _state_values(
    optimizer: Any, stored: str, store: Mapping[str, Any]
) -> list[tuple[Variable, Any]]:
    """Return values for the part of the strategy's state that the file does not have by name.

    Args:
        optimizer: the optimizer that loads.
        stored: the name of the strategy's class in the file.
        store: the file.
    """
    rule, counters = optimizer.loss_scale, optimizer.scaled_step.counters
    own, initial = counters.counts, rule.init()._asdict()
    if stored != type(rule).__name__:  # another strategy's counts mean something else
        values = [(v, initial[name]) for name, v in own.items()]
        if stored == NoOpLossScale.__name__:  # its scale of 1 was never searched for
            values.append((counters.rule.scale, initial["scale"]))
        return values
    keys = {*store.keys()}
    values = [(v, initial[name]) for name, v in own.items() if v.name not in keys]
    if stored == AmaxLossScale.__name__ and values:  # of kmp 0.1: one counter with a sign
        count = int(np.asarray(store["step_counter"]))
        values = [(own["wait"], max(count, 0)), (own["zero_steps"], max(-count, 0))]
        values.append((optimizer.step_counter, 0))
    return values


def _checked_layout(optimizer: Any, store: Mapping[str, Any]) -> dict[str, Any]:
    """Check that a file of kmp's fits the optimizer; return its description, if it has one."""
    missing = {*_REQUIRED, _INNER_SIZES} - set(store.keys())
    if missing:
        raise ValueError(f"The stored optimizer state is incomplete: {sorted(missing)} missing.")
    layout: dict[str, Any] = {}
    if _LAYOUT in set(store.keys()):
        layout = json.loads(bytes(np.asarray(store[_LAYOUT], "uint8")).decode())
    # In files of kmp 0.1 AmaxLossScale counts steps of zeros downwards.
    signed = {"step_counter"} if layout.get("rule") == AmaxLossScale.__name__ else set()
    negative = [x for x in _COUNTERS if x not in signed and np.any(np.asarray(store[x]) < 0)]
    if negative:
        raise ValueError(
            f"The stored optimizer state is damaged: a counter is negative. Received: {negative}. "
            "Load another checkpoint."
        )
    live = layout_of(optimizer)
    if "slots" in layout:
        stored = _stored_layout(layout)
        if stored.is_of_other_weights(live):
            _warn_of_other_weights(optimizer, stored)
            converts = True
        else:
            _check_slots(optimizer, stored, live)
            converts = not stored.holds_as(live)
    else:
        stored, sizes = live, np.asarray(store[_INNER_SIZES]).tolist()
        if sizes != _sizes(optimizer.inner_optimizer.variables).tolist():
            raise _mismatch(optimizer, f"{len(sizes)} variables of other sizes", len(live.slots))
        converts = bool(live.exact)  # what the file has for remainders may be masters
    if converts:
        _convert_the_inner(optimizer, stored)
    return layout


def _stored_layout(layout: Mapping[str, Any]) -> Layout:
    known = [field.name for field in dataclasses.fields(Layout)]
    return Layout(**{"rows": None} | {name: layout[name] for name in known if name in layout})


def _is_of_other_weights(optimizer: Any, layout: Mapping[str, Any]) -> bool:
    live = layout_of(optimizer)
    return "slots" in layout and _stored_layout(layout).is_of_other_weights(live)


def _warn_of_other_weights(optimizer: Any, stored: Layout) -> None:
    """Say what is not restored of the state of an optimizer that updated other weights."""
    shared = stored.shared_with(layout_of(optimizer))
    new = [path for path in optimizer.variable_paths if path not in shared]
    gone = [path for path in stored.weights or [] if path not in shared.values()]
    parts = [
        f"{what}: {', '.join(paths[:3])}{f' and {len(paths) - 3} more' * (len(paths) > 3)}."
        for what, paths in (("Begins anew", new), ("Left out", gone))
        if paths
    ]
    warn(
        f"The state of {optimizer.name!r} was saved when other weights were trainable. That of the "
        f"weights that are trained now is restored. {' '.join(parts)} Measurements begin anew, too."
    )


def _check_slots(optimizer: Any, stored: Layout, live: Layout) -> None:
    """Raise ValueError if a file has other slots, beside what the float32 of weights is made of."""
    ours, theirs = ([x.slots[i] for i in x.numbers] for x in (live, stored))
    if len(ours) != len(theirs):
        raise _mismatch(optimizer, f"{len(stored.slots)} variables", len(live.slots))
    for our, their in zip(ours, theirs, strict=True):
        if not is_same_slot(their, our):
            raise _mismatch(
                optimizer,
                f"{their[0]!r} of shape {tuple(their[1:])} where this one has "
                f"{our[0]!r} of shape {tuple(our[1:])}",
                len(live.slots),
            )


def _convert_the_inner(optimizer: Any, stored: Layout) -> None:
    """Make the inner optimizer's next load convert what the file holds in another way."""
    inner = optimizer.inner_optimizer

    def load(store: Mapping[str, Any]) -> None:
        del inner.load_own_variables
        load_converted(optimizer, stored, store)

    inner.load_own_variables = load


def _sizes(variables: list[Variable]) -> np.ndarray:
    return np.array([np.prod(v.shape, dtype="int64") for v in variables], "int64")


def _mismatch(optimizer: Any, stored: str, expected: int) -> ValueError:
    return ValueError(
        f"The stored optimizer state does not fit {type(optimizer.inner_optimizer).__name__} of "
        f"this model. Expected: the state of kmp.scaled({type(optimizer.inner_optimizer).__name__})"
        f", of Keras's LossScaleOptimizer or of the bare optimizer, with {expected} inner "
        f"variables. Received: {stored}. Compile with the optimizer that the state was saved from. "
        "Without this state a model is loaded by load_model(path, compile=False), and weights by "
        "load_weights(path, skip_mismatch=True)."
    )


def _within_bounds(rule: Any, scale: Any) -> Any:
    """The stored scale, clipped to the bounds of the present rule."""
    if isinstance(rule, (StaticLossScale, NoOpLossScale)):
        return rule.init().scale
    if not isinstance(rule, DynamicLossScale):
        return scale
    finite = np.nan_to_num(to_numpy(scale), nan=rule.min_scale)
    return np.clip(finite, rule.min_scale, rule.max_scale)


def _assign_all(optimizer: Any, values: list[tuple[Variable, Any]]) -> None:
    arrays = [(variable, to_numpy(value)) for variable, value in values]
    wrong = [v.path for v, x in arrays if tuple(x.shape) != tuple(v.shape)]
    if wrong:
        inner = optimizer.inner_optimizer.variables
        raise _mismatch(optimizer, f"other shapes for {wrong[:3]}", len(inner))
    for variable, array in arrays:
        variable.assign(keras.ops.convert_to_tensor(array, variable.dtype))


def _sizes_before_first_step(store: Mapping[str, Any]) -> list[int] | None:
    """The sizes of the inner optimizer's variables if `store` was saved before the first step.

    An optimizer that is not built has an iteration, 0, and a learning rate, unless a schedule gives
    that; so does its inner optimizer. Returns None if `store` holds more.
    """
    keys = set(store.keys())
    if _INNER_SIZES in keys:
        built = not keys <= {_INNER_SIZES, _LAYOUT, *_UNBUILT}
        return None if built else np.asarray(store[_INNER_SIZES]).tolist()
    if "0" not in keys or len(keys) > 2 * len(_UNBUILT) or any(np.shape(store[k]) for k in keys):
        return None
    if np.asarray(store["0"]) != 0:
        return None
    # Keras's LossScaleOptimizer stores its own two before those of the inner optimizer.
    is_wrapper = len(keys) > len(_UNBUILT)
    return [1] * (len(keys) - is_wrapper * len(_UNBUILT))


def _load_before_first_step(optimizer: Any, store: Mapping[str, Any], sizes: list[int]) -> None:
    """Load the state of an optimizer that was saved before it was built: all of it, or nothing."""
    inner = optimizer.inner_optimizer
    complete = sizes == _sizes(inner.variables).tolist()
    if not complete and (len(sizes) > len(_UNBUILT) or set(sizes) != {1}):
        raise _mismatch(optimizer, f"{len(sizes)} variables of other sizes", len(inner.variables))
    # `inner.iterations` is computed if gradients are accumulated, and 0 in the first window.
    if not complete and (int(optimizer.steps.numpy()) or int(steps_of(inner).numpy())):
        warn(
            f"The state of {optimizer.name!r} is not loaded, and stays as it is: the file was "
            "saved before the optimizer's first step."
        )
        return
    if optimizer.built:
        _assign_all(optimizer, _initial_values(optimizer))
        if not complete:
            _begin_slots_again(optimizer)
    keys = set(store.keys())
    if "0" in keys and len(keys) == len(sizes):  # of a bare optimizer: the file has no inner one
        _load_unbuilt(inner, store)
    _expect_less_of_the_inner(inner)


def _initial_values(optimizer: Any) -> list[tuple[Variable, Any]]:
    """The wrapper's variables as `build` makes them, without those that are settings."""
    own = {v.name: v for v in optimizer.own_variables}
    settings = ("learning_rate", "rounding_seed", "sampling")
    zeros = [(v, np.zeros(v.shape)) for name, v in own.items() if name not in settings]
    state = optimizer.scaled_step.counters.rule
    return [*zeros, *zip(state, optimizer.loss_scale.init(), strict=True)]


def _begin_slots_again(optimizer: Any) -> None:
    """Set slots that begin as copies of the weights to the weights that have just been loaded.

    ScheduleFreeAdamW has such slots. When a model is loaded, its optimizer is built before the
    weights are there; the first step would bring the weights back to what they were then.
    """
    inner = optimizer.inner_optimizer
    try:
        again = type(inner).from_config(inner.get_config())
    except TypeError:  # a class of the user's without `get_config`
        return

    def add_counter(name: str, dtype: str) -> Variable:
        return keras.Variable(0, dtype=dtype, trainable=False, name=name)

    build_inner(again, trainable_variables_of(inner), optimizer.half_memory, add_counter)
    for variable, fresh in zip(inner.variables, again.variables, strict=True):
        if variable.name not in _UNBUILT:
            variable.assign(fresh)


def _expect_less_of_the_inner(inner: Any) -> None:
    """Make the inner optimizer's next load accept a file with few of its variables, or none."""
    keras_loader = inner.load_own_variables
    inner.load_own_variables = functools.partial(_load_inner, inner, keras_loader)


def _load_inner(inner: Any, keras_loader: Any, store: Mapping[str, Any]) -> None:
    del inner.load_own_variables
    number = len(store.keys())
    if number > len(_UNBUILT) or number == len(inner.variables):
        keras_loader(store)
    else:
        _load_unbuilt(inner, store)


def _load_unbuilt(inner: Any, store: Mapping[str, Any]) -> None:
    """Load iteration and learning rate, which Keras numbers first."""
    for i, variable in enumerate(inner.variables[: len(store.keys())]):
        if variable.name in _UNBUILT:
            variable.assign(store[str(i)])


def grad_scaler_state(optimizer: Any) -> dict[str, Any]:
    """Return the loss scale's state as `torch.amp.GradScaler.state_dict()` does."""
    rule = optimizer.loss_scale
    is_dynamic = type(rule) is DynamicLossScale
    return {
        "scale": float(optimizer.scale_variable.numpy()),
        "growth_factor": getattr(rule, "growth_factor", 1.0),
        "backoff_factor": getattr(rule, "backoff_factor", 1.0),
        "growth_interval": getattr(rule, "growth_interval", 2**31 - 1),
        # AmaxLossScale counts other steps.
        _TRACKER: int(optimizer.step_counter.numpy()) if is_dynamic else 0,
    }


def load_grad_scaler_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Continue from a GradScaler's `state_dict()`; see `LossScaleOptimizer.load_state`."""
    if not isinstance(state, Mapping) or set(state) != set(_GRAD_SCALER_KEYS):
        raise ValueError(
            f"`state` must be a dictionary with the keys {_GRAD_SCALER_KEYS}, as "
            "torch.amp.GradScaler.state_dict() returns it. Received: "
            f"{sorted(state) if isinstance(state, Mapping) else type(state).__name__}."
        )
    if not isinstance(optimizer.loss_scale, DynamicLossScale) or not optimizer.built:
        raise ValueError(
            "A GradScaler's state goes into a built optimizer with a dynamic loss scale. Received: "
            f"built={optimizer.built}, loss_scale={optimizer.loss_scale}. Write "
            'kmp.scaled(..., loss_scale="dynamic") and optimizer.build(model.trainable_variables).'
        )
    scale = scale_number("scale", state["scale"], "the GradScaler state")
    tracker = number(_TRACKER, state[_TRACKER], "the GradScaler state")
    tracker = whole_number(f"{_TRACKER} + 1", tracker + 1, "the GradScaler state") - 1
    optimizer.loss_scale = dataclasses.replace(
        optimizer.loss_scale,
        **{name: state[name] for name in _OF_RULES},
        min_scale=min(optimizer.loss_scale.min_scale, scale),
        max_scale=max(optimizer.loss_scale.max_scale, scale),
    )
    optimizer.scale_variable.assign(scale)
    optimizer.step_counter.assign(tracker)

"""Dtype policies: the dtypes of parameters, of computation and of outputs."""

import contextvars
from typing import Any, NamedTuple, TypeVar

import keras
from keras import DTypePolicy, FloatDTypePolicy
from keras.dtype_policies import DTypePolicyMap

from kmp._backend.types import DType
from kmp.precision.trees import SHORT_NAMES, as_float_dtype, cast_floats

T = TypeVar("T")

AUTOCAST = "autocast"

_KEYS = {
    **dict.fromkeys(("p", "param", "params"), "param_dtype"),
    **dict.fromkeys(("c", "compute"), "compute_dtype"),
    **dict.fromkeys(("o", "out", "output"), "output_dtype"),
    **dict.fromkeys(("i", "in", "inputs"), "inputs"),
}
_UNCAST = "uncast"
_MIXED = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


class Scope(NamedTuple):
    """An open `kmp.autocast` scope."""

    policy: "Policy"
    enabled: bool
    policy_before: Any  # the global policy when this scope was opened
    policy_outside: Any  # the global policy when the outermost scope was opened
    parent: "Scope | None"


# Every thread starts without a scope, as it starts with a global policy of its own in Keras.
current_scope = contextvars.ContextVar[Scope | None]("kmp_autocast_scope", default=None)


@keras.saving.register_keras_serializable(package="kmp")
class Policy(DTypePolicy):
    """The dtypes of parameters, computation and outputs.

    A `keras.DTypePolicy`, so any Keras layer takes it as `dtype=`. It also reads JMP's strings:

        "mixed_bfloat16"                 params=float32, compute=bfloat16   (Keras)
        "float16"                        everything in float16              (Keras, JMP)
        "half", "full"                   everything in half_dtype(), float32      (JMP)
        "p=f32,c=bf16,o=f32"             one dtype each                           (JMP)
        "params=float32,compute=float16,output=float32"                     the same, spelled out
        "autocast"                       half precision while a `kmp.autocast` scope is open
        "mixed_bfloat16,i=uncast"        as before the comma, and a layer's inputs are not cast

    In the `key=dtype` strings, params default to float32, compute to params, and output to
    compute. Keras calls the parameters' dtype `variable_dtype`.

    The casts take nested structures of tensors, KerasTensors and arrays, and only change floats:
    integers, bools, strings, None, Python numbers and Keras masks stay as they are.

    Keras's own layers ignore `output_dtype` and return their compute dtype. It takes effect in
    `cast_to_output`, in functions decorated with `kmp.autocast`, in
    `kmp.layers.Float32BatchNormalization` and at the outputs of `kmp.to_mixed_precision` models.

    Keras casts the float inputs of a layer to its compute dtype, which rounds ids. With `i=uncast`
    the code of the layer gets its inputs as they are, except for float64, which becomes float32.
    The weights that it gets are in half precision all the same: `keras.ops` combine them with
    float32 inputs in float32, but Python's operators on TensorFlow's tensors raise.

    A policy that Keras has a name for, such as `"mixed_float16"`, is saved under that name, and
    the file loads without kmp. For other policies, `import kmp` before loading the file.

    Args:
        name: str as above, or the dtype of the parameters when other dtypes are given too:
            `Policy("float32", "float16", "float32")`. Defaults to the global policy.
        compute_dtype: float dtype; defaults to the dtype of the parameters.
        output_dtype: float dtype; defaults to `compute_dtype`.
        param_dtype: float dtype, instead of `name`; defaults to float32.

    Raises:
        ValueError: for an unknown or repeated key; for a dtype that is unknown or no float
            (for float8, use Keras's `quantize`); for a policy's name together with dtypes.

    Example:

    >>> policy = Policy("p=f32,c=bf16,o=f32")
    >>> policy.compute_dtype, policy.output_dtype, str(policy)
    ('bfloat16', 'float32', 'p=f32,c=bf16,o=f32')
    >>> x = policy.cast_to_compute({"x": np.ones(2, "float32"), "ids": np.arange(2)})
    >>> str(x["x"].dtype), str(x["ids"].dtype)
    ('bfloat16', 'int64')

    Source: JMP (`Policy`, `get_policy`), Keras 3 (`DTypePolicy`).
    """

    def __init__(
        self,
        name: Any = None,
        compute_dtype: Any = None,
        output_dtype: Any = None,
        *,
        param_dtype: Any = None,
    ):
        dtypes = {"compute_dtype": compute_dtype, "output_dtype": output_dtype}
        dtypes = {key: as_float_dtype(x) for key, x in dtypes.items() if x is not None}
        if param_dtype is not None and name is not None:
            raise ValueError(
                "Give the dtype of the parameters by `name` or by `param_dtype`, not both. "
                f"Received: name={name!r}, param_dtype={param_dtype!r}. Write "
                "kmp.Policy(param_dtype='float32', compute_dtype='float16')."
            )
        if param_dtype is not None or dtypes:
            params = name if name is not None else param_dtype
            dtypes["param_dtype"] = as_float_dtype("float32" if params is None else params)
        else:
            dtypes = _parse(keras.config.dtype_policy() if name is None else name)
        self.adapts = dtypes.pop(AUTOCAST, False)
        self.casts_inputs = dtypes.pop("inputs", None) != _UNCAST
        self._variable_dtype = dtypes.get("param_dtype", "float32")
        self._compute_dtype = dtypes.get("compute_dtype", self._variable_dtype)
        self._output_dtype = dtypes.get("output_dtype")
        self._quantization_mode = None
        own_name = f"p={self._variable_dtype},c={self._compute_dtype}"
        self._name = AUTOCAST if self.adapts else self._keras_name() or own_name

    def _keras_name(self) -> str | None:
        """Keras's name for the parameter and compute dtypes; `compile` looks for float16 in it."""
        if self._variable_dtype == self._compute_dtype:
            return self._compute_dtype
        named = [name for name, half in _MIXED.items() if half == self._compute_dtype]
        return named[0] if named and self._variable_dtype == "float32" else None

    @property
    def param_dtype(self) -> DType:
        """The dtype of the parameters, Keras's `variable_dtype`."""
        return self._variable_dtype

    @property
    def compute_dtype(self) -> DType:
        """The dtype of inputs and operations; for `"autocast"`, that of the scope open now."""
        if self.adapts:
            scope = current_scope.get()
            return scope.policy.compute_dtype if scope and scope.enabled else "float32"
        return self._compute_dtype

    @property
    def output_dtype(self) -> DType:
        """The dtype of the outputs; `compute_dtype` if no other was given."""
        return self._output_dtype or self.compute_dtype

    @property
    def has_output_dtype(self) -> bool:
        """Whether an output dtype was given."""
        return self._output_dtype is not None

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """Return a copy with another output dtype.

        >>> Policy("mixed_float16").with_output_dtype("float32").output_dtype
        'float32'
        """
        if self.adapts:
            raise ValueError(
                'The policy "autocast" has the output dtype of the scope. Received: '
                f'output_dtype={output_dtype!r}. Write kmp.autocast("p=f32,c=bf16,o=f32").'
            )
        policy = Policy(self._variable_dtype, self._compute_dtype, output_dtype)
        return policy if self.casts_inputs else policy.with_inputs_uncast()

    def with_inputs_uncast(self) -> "Policy":
        """Return a copy under which Keras does not cast a layer's inputs.

        >>> Policy("mixed_float16").with_inputs_uncast()
        <Policy "mixed_float16,i=uncast">
        """
        return Policy(f"{self},i={_UNCAST}") if self.casts_inputs else self

    def convert_input(self, x: Any, autocast: bool, dtype: DType) -> Any:
        """What Keras hands to a layer for `x`: a tensor, in the compute dtype if it has floats.

        With `i=uncast` floats stay as they are, but for float64, which becomes float32.

        Args:
            x: argument of a layer's call, of any shape and dtype.
            autocast: whether the layer lets Keras cast.
            dtype: what to cast to.
        """
        if self.casts_inputs:
            return super().convert_input(x, autocast, dtype)
        is_double = "float64" in str(getattr(x, "dtype", ""))
        return super().convert_input(x, autocast and is_double, "float32")

    def cast_to_param(self, tree: T) -> T:
        """Return the structure with its floats cast to `param_dtype`."""
        return cast_floats(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Return the structure with its floats cast to `compute_dtype`."""
        return cast_floats(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Return the structure with its floats cast to `output_dtype`."""
        return cast_floats(tree, self.output_dtype)

    def __str__(self) -> str:
        dtypes = (self._variable_dtype, self._compute_dtype, self._output_dtype)
        pairs = zip("pco", dtypes, strict=True)
        spelled = [f"{key}={SHORT_NAMES.get(x, x)}" for key, x in pairs if x]
        named = self._output_dtype is None and (self.adapts or self._keras_name())
        words = [self._name] if named else spelled
        return ",".join(words if self.casts_inputs else [*words, f"i={_UNCAST}"])

    def __repr__(self) -> str:
        return f'<Policy "{self}">'

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, str):
            return self._name == other
        if isinstance(other, Policy):
            return self._dtypes() == other._dtypes()
        if type(other) not in (DTypePolicy, FloatDTypePolicy):
            return False  # quantized, or a map
        dtypes = other.variable_dtype, other.compute_dtype, other.compute_dtype
        return self._dtypes() == (False, True, *dtypes)

    def __hash__(self) -> int:
        return hash(self._name)

    def _dtypes(self) -> tuple[Any, ...]:
        output = self._output_dtype or self._compute_dtype
        return self.adapts, self.casts_inputs, self._variable_dtype, self._compute_dtype, output

    @property
    def is_kerass(self) -> bool:
        """Whether Keras's policy of the same name says as much."""
        says_more = self.adapts or self._output_dtype is not None or not self.casts_inputs
        return not says_more and self._keras_name() is not None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Keras saves the class of a policy. A file that names Keras's class loads without kmp.
        return DTypePolicy if self.is_kerass else Policy

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, (str(self),)

    def get_config(self) -> dict[str, Any]:
        return {"name": str(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Policy":
        return _LoadedPolicy(**config)


class _LoadedPolicy(Policy):
    """A policy loaded from a file.

    Keras rebuilds the layer from the policy's `name`, which says less than the policy. So `name`
    returns the policy itself, which compares equal to its name.
    """

    @property
    def name(self) -> Policy:
        return Policy(str(self))


def plain(policy: DTypePolicy) -> DTypePolicy:
    """Return Keras's own policy of the same name if that says as much, else `policy`."""
    if isinstance(policy, Policy) and policy.is_kerass:
        return DTypePolicy(policy.name)
    return policy


def on_weights(policy: DTypePolicy, param_dtype: DType) -> DTypePolicy:
    """Return a policy that computes as `policy` does, on weights of another dtype."""
    if policy.variable_dtype == param_dtype:
        return policy
    found = Policy(param_dtype, policy.compute_dtype)
    return found if getattr(policy, "casts_inputs", True) else found.with_inputs_uncast()


def get_policy(policy: Any = None) -> Policy:
    """Return the policy that a string, a dtype or a Keras policy describes.

    Args:
        policy: a name, a dtype or a `keras.DTypePolicy`; None for the global policy.

    Raises:
        ValueError: if it describes no policy, or is quantized or a `DTypePolicyMap`.

    Example:

    >>> get_policy("params=float32,compute=float16,output=float32")
    <Policy "p=f32,c=f16,o=f32">

    Source: JMP, `get_policy`.
    """
    if policy is None:
        policy = keras.config.dtype_policy()
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, DTypePolicyMap):
        raise ValueError(
            "A `DTypePolicyMap` gives each layer a policy of its own. Received: one with the "
            f"default {policy.default_policy.name!r}. Write kmp.get_policy(map[layer.path])."
        )
    return Policy(policy)


def set_policy(policy: Any) -> None:
    """Set the global policy, which layers created from now on take by default.

    Args:
        policy: anything that `kmp.get_policy` takes.

    Raises:
        ValueError: if it describes no policy; the global policy then stays unchanged.

    Example:

    >>> set_policy("mixed_bfloat16")
    >>> keras.layers.Dense(1).compute_dtype
    'bfloat16'
    >>> set_policy("float32")
    """
    keras.config.set_dtype_policy(get_policy(policy))


def _parse(policy: Any) -> dict[str, Any]:
    """The dtypes in a policy's name, keyed by the arguments of `Policy`."""
    if isinstance(policy, DTypePolicy):
        policy = str(policy) if isinstance(policy, Policy) else policy.name
    if not isinstance(policy, str):
        return {"param_dtype": as_float_dtype(policy)}
    if policy == AUTOCAST:
        return {AUTOCAST: True}
    if policy in _MIXED:
        return {"param_dtype": "float32", "compute_dtype": _MIXED[policy]}
    if "=" not in policy:
        return {"param_dtype": as_float_dtype(policy)}
    dtypes: dict[str, Any] = {}
    parts = policy.split(",")
    if "=" not in parts[0]:  # "mixed_float16,i=uncast"
        dtypes = _parse(parts.pop(0).strip())
    for part in parts:
        key, _, dtype = (x.strip() for x in part.partition("="))
        argument = _KEYS.get(key)
        known = argument in dtypes or (AUTOCAST in dtypes and argument != "inputs")
        if argument is None or known:
            what = "unknown" if argument is None else "repeated"
            raise ValueError(
                "A policy string may set params, compute, output and inputs (p, c, o, i) once "
                f"each. Received: {policy!r} with the {what} key {key!r}. Write for example "
                '"params=float32,compute=float16,output=float32".'
            )
        if argument == "inputs" and dtype != _UNCAST:
            raise ValueError(
                f"Inputs are cast to the compute dtype, or not at all. Received: {policy!r}. Write "
                f'"i={_UNCAST}", or leave {part.strip()!r} out.'
            )
        dtypes[argument] = dtype if argument == "inputs" else as_float_dtype(dtype)
    return dtypes

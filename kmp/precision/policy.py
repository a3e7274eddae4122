"""Which numbers go where: dtypes of parameters, of computation and of output."""

from typing import Any, TypeVar

import keras

from kmp._backend.types import DType
from kmp.precision.scope import current_scope
from kmp.precision.trees import SHORT_NAMES, as_float_dtype, cast_floats

T = TypeVar("T")

AUTOCAST = "autocast"

_KEYS = {
    **dict.fromkeys(("p", "param", "params"), "param_dtype"),
    **dict.fromkeys(("c", "compute"), "compute_dtype"),
    **dict.fromkeys(("o", "out", "output"), "output_dtype"),
}
_MIXED = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


@keras.saving.register_keras_serializable(package="kmp")
class Policy(keras.DTypePolicy):
    """The dtypes of parameters, computation and output, in one value.

    A `keras.DTypePolicy`, so that any Keras layer takes it as `dtype=`, and a JMP policy:

        "mixed_bfloat16"                 params=float32, compute=bfloat16   (Keras)
        "float16"                        everything in float16              (Keras, JMP)
        "half", "full"                   everything in half_dtype(), float32      (JMP)
        "p=f32,c=bf16,o=f32"             each by itself                           (JMP)
        "params=float32,compute=float16,output=float32"                     the same, spelled out
        "autocast"                       half precision while a `kmp.autocast` scope is open

    In the third form params are float32 if left out, compute follows params, output follows
    compute. Keras calls the parameters' dtype `variable_dtype`.

    The casts work on nested structures of tensors, KerasTensors and arrays, inside compiled code
    too. They touch floats alone: integers, bools, strings, None and Python numbers stay as they
    are, and a tensor keeps its Keras mask.

    Keras's own layers return their compute dtype whatever `output_dtype` says. It is honoured by
    the `cast_to_output` of JMP's style, by `kmp.autocast` on functions, by
    `kmp.layers.Float32BatchNormalization`, and by `kmp.to_mixed_precision` at a model's outputs.

    Saved files name a policy without an output dtype of its own as Keras does, so that Keras
    alone can load them; the others need `import kmp` before loading.

    Args:
        name: str as above, or the dtype of the parameters if others follow:
            `Policy("float32", "float16", "float32")`. The global policy if nothing is given.
        compute_dtype: float dtype; follows the parameters if left out.
        output_dtype: float dtype; follows `compute_dtype` if left out.
        param_dtype: float dtype, in place of `name`; float32 if left out.

    Attributes:
        param_dtype, compute_dtype, output_dtype: str, such as `"bfloat16"`.
        has_output_dtype: bool, whether the output dtype was given and does not just follow.

    Raises:
        ValueError: for an unknown or repeated key, a dtype that is none or no float (float8
            included: Keras trains it by `quantize`), or a name together with dtypes.

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
                "The dtype of the parameters is given by `name` or by `param_dtype`. Received: "
                f"name={name!r}, param_dtype={param_dtype!r}. Write kmp.Policy(param_dtype="
                "'float32', compute_dtype='float16', output_dtype='float32')."
            )
        if param_dtype is not None or dtypes:
            params = name if name is not None else param_dtype
            dtypes["param_dtype"] = as_float_dtype("float32" if params is None else params)
        elif name is None:
            dtypes = _parse(keras.config.dtype_policy())
        else:
            dtypes = _parse(name)
        self.adapts = dtypes.pop(AUTOCAST, False)
        self._variable_dtype = dtypes.get("param_dtype", "float32")
        self._compute_dtype = dtypes.get("compute_dtype", self._variable_dtype)
        self._output_dtype = dtypes.get("output_dtype")
        self._quantization_mode = None
        own_name = f"p={self._variable_dtype},c={self._compute_dtype}"
        self._name = AUTOCAST if self.adapts else self._keras_name() or own_name

    def _keras_name(self) -> str | None:
        """Keras's word for the two dtypes that it knows of, by which `compile` finds float16."""
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
        """The dtype of inputs and operations; under `"autocast"`, at the moment of asking."""
        if self.adapts:
            scope = current_scope.get()
            return scope.policy.compute_dtype if scope and scope.enabled else "float32"
        return self._compute_dtype

    @property
    def output_dtype(self) -> DType:
        """The dtype of what is returned; `compute_dtype` if no other was given."""
        return self._output_dtype or self.compute_dtype

    @property
    def has_output_dtype(self) -> bool:
        """Whether an output dtype was given, rather than following `compute_dtype`."""
        return self._output_dtype is not None

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """Return the policy with another output dtype.

        >>> Policy("mixed_float16").with_output_dtype("float32").output_dtype
        'float32'
        """
        if self.adapts:
            raise ValueError(
                'The policy "autocast" has the output dtype of the scope. Received: '
                f"output_dtype={output_dtype!r}. Give it to the scope: "
                'kmp.autocast("p=f32,c=bf16,o=f32").'
            )
        return Policy(self._variable_dtype, self._compute_dtype, output_dtype)

    def cast_to_param(self, tree: T) -> T:
        """Return the structure with its floats in `param_dtype`."""
        return cast_floats(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Return the structure with its floats in `compute_dtype`."""
        return cast_floats(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Return the structure with its floats in `output_dtype`."""
        return cast_floats(tree, self.output_dtype)

    def __str__(self) -> str:
        if self._output_dtype is None and (self.adapts or self._keras_name()):
            return self._name
        dtypes = (self._variable_dtype, self._compute_dtype, self._output_dtype)
        pairs = zip("pco", dtypes, strict=True)
        return ",".join(f"{key}={SHORT_NAMES.get(x, x)}" for key, x in pairs if x)

    def __repr__(self) -> str:
        return f'<Policy "{self}">'

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self._name == other
        if isinstance(other, Policy):
            return self._dtypes() == other._dtypes()
        plain = (keras.DTypePolicy, keras.FloatDTypePolicy)  # and neither quantized nor a map
        if not isinstance(other, keras.DTypePolicy) or type(other) not in plain:
            return False
        dtypes = other.variable_dtype, other.compute_dtype, other.compute_dtype
        return self._dtypes() == (False, *dtypes)

    def __hash__(self) -> int:
        return hash(self._name)

    def _dtypes(self) -> tuple:
        output = self._output_dtype or self._compute_dtype
        return self.adapts, self._variable_dtype, self._compute_dtype, output

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Keras writes the class of a policy into its files. Where Keras's own says as much, a file
        # that names it can be loaded without kmp.
        portable = not self.adapts and self._output_dtype is None and self._keras_name()
        return keras.DTypePolicy if portable else Policy

    def __reduce__(self) -> tuple:
        return Policy, (str(self),)

    def get_config(self) -> dict[str, Any]:
        return {"name": str(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Policy":
        return _LoadedPolicy(**config)


class _LoadedPolicy(Policy):
    """A policy as it comes out of a file.

    Keras makes the layer from the `name` of the policy that it has loaded, of which it could not
    make the policy again. So the name is the policy; it equals the name.
    """

    @property
    def name(self):
        return Policy(str(self))


def get_policy(policy: Any = None) -> Policy:
    """Return the policy that a string, a dtype or a Keras policy describes.

    Args:
        policy: what `kmp.Policy` takes as `name`, a `keras.DTypePolicy`, or None for the global
            policy.

    Returns:
        `kmp.Policy`.

    Raises:
        ValueError: if it describes none; quantized policies and `DTypePolicyMap` included.

    Example:

    >>> get_policy("params=float32,compute=float16,output=float32")
    <Policy "p=f32,c=f16,o=f32">

    Source: JMP, `get_policy`.
    """
    if policy is None:
        policy = keras.config.dtype_policy()
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        raise ValueError(
            "A `DTypePolicyMap` gives each layer a policy of its own. Received: one with the "
            f"default {policy.default_policy.name!r}. Write kmp.get_policy(map[layer.path])."
        )
    if isinstance(policy, keras.DTypePolicy):
        return Policy(policy.name)
    return Policy(policy)


def set_policy(policy: Any) -> None:
    """Make a policy the global one: layers built from now on take it.

    Args:
        policy: what `kmp.get_policy` takes.

    Raises:
        ValueError: if it describes no policy; the global policy stays as it was.

    Example:

    >>> set_policy("mixed_bfloat16")
    >>> keras.layers.Dense(1).compute_dtype
    'bfloat16'
    >>> set_policy("float32")
    """
    keras.config.set_dtype_policy(get_policy(policy))


def _parse(policy: Any) -> dict[str, Any]:
    """The dtypes that the name of a policy gives, by argument of `Policy`."""
    if isinstance(policy, keras.DTypePolicy):
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
    for part in policy.split(","):
        key, _, dtype = (x.strip() for x in part.partition("="))
        argument = _KEYS.get(key)
        if argument is None or argument in dtypes:
            what = "unknown" if argument is None else "repeated"
            raise ValueError(
                "A policy's string gives each of params, compute and output (p, c, o) at most "
                f"once. Received: {policy!r} with the {what} key {key!r}. Write for example "
                '"params=float32,compute=float16,output=float32".'
            )
        dtypes[argument] = as_float_dtype(dtype)
    return dtypes

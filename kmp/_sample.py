"""The dear measurements: exponents and updates, from a sample of each variable.

All variables share one concatenation and one segment sum, so that neither the compile time nor the
number of kernels grows with them. The sample is strided along each axis on its own: a flattened
one would gather a sharded variable on every device.
"""

import math
from collections.abc import Sequence

import numpy as np
from keras import ops

from kmp import _backend
from kmp._reduction import SMALL, Part
from kmp._types import Tensor, Variable

SAMPLE_SIZE = SMALL  # numbers of a variable at most: a share of 0.1% is then four of them
LOWEST, HIGHEST = -28, 16  # the exponents at the ends, where those beyond are counted too
# Zeros, one bin an exponent, and what is not finite. `[2**e, 2**(e + 1))` of the scaled gradient.
BINS = HIGHEST - LOWEST + 3
COLUMNS = ("weight_norm", "update_norm", "unmoved_share")
WEIGHT_NORM, UPDATE_NORM, UNMOVED_SHARE = range(len(COLUMNS))
_KEYS = BINS + 3  # beside the bins: three sums
_EXPONENT_BITS, _BIAS, _MANTISSA = 255, 127, 23


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """One stride an axis that leave at most `SAMPLE_SIZE` numbers, and more than an eighth of it.

    They are odd: a stride of 64 over 512 columns would see eight columns alone.

    Example:

    >>> strides_of((512, 512))
    (7, 15)
    """
    strides = [1] * len(shape)
    while math.prod(left := _left(shape, strides)) > SAMPLE_SIZE:
        axis = len(left) - 1 - left[::-1].index(max(left))
        strides[axis] = 2 * strides[axis] + 1
    return tuple(strides)


def sample_size(shape: Sequence[int]) -> int:
    """How many numbers of a variable of this shape are sampled."""
    return math.prod(_left(shape, strides_of(shape)))


def _left(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [-(-size // stride) for size, stride in zip(shape, strides, strict=True)]


def layout(parts: Sequence[Part], number: int) -> list[int]:
    """The order in which a sample of gradients holds the variables, `number` of them."""
    order = [i for part in parts for i in part.members]
    return order + sorted(set(range(number)) - set(order))


def sample(parts: Sequence[Part], variables: Sequence[Variable]) -> Tensor:
    """float32[n]: samples of the gradients in `parts`, in their `layout`.

    A variable that has no gradient gives zeros.
    """
    samples = []
    for part in parts:
        shape = tuple(variables[part.members[0]].shape)
        of_each = part.values
        if not part.stacked:
            of_each = _backend.gradient_sample(part.values, strides_of(shape))
        # (The number of a sparse gradient's rows is known at run time alone.)
        samples.append(ops.reshape(of_each, (len(part.members) * sample_size(shape),)))
    absent = layout(parts, len(variables))[sum(len(part.members) for part in parts) :]
    missing = sum(sample_size(variables[i].shape) for i in absent)
    return _together([*samples, ops.zeros((missing,))])


def sample_weights(variables: Sequence[Variable], order: Sequence[int]) -> Tensor:
    """float32[n]: the samples of the variables' present values, in this order."""
    values = [(ops.convert_to_tensor(variables[i]), strides_of(variables[i].shape)) for i in order]
    return _together([ops.reshape(_backend.gradient_sample(*pair), (-1,)) for pair in values])


def _together(samples: Sequence[Tensor]) -> Tensor:
    return ops.concatenate([ops.cast(x, "float32") for x in samples])


def measure_sample(
    gradient: Tensor,
    before: Tensor,
    after: Tensor,
    variables: Sequence[Variable],
    order: Sequence[int],
) -> Tensor:
    """Measure gradients, weights and their update.

    Args:
        gradient: float32[n], the sample of the scaled gradients, as they were in float16.
        before: float32[n], the sample of the weights before the update.
        after: float32[n], the one after it.
        variables: the variables, for their shapes.
        order: the order of all three.

    Returns:
        float32[num_variables, 3 + 47]: `COLUMNS`, then the counts of zeros, of each exponent of
        the gradient and of what is not finite. Norms are estimates of the whole variable's.
    """
    shapes = [tuple(v.shape) for v in variables]
    sizes = [sample_size(shape) for shape in shapes]
    update = ops.subtract(after, before)
    unmoved = ops.logical_and(ops.not_equal(gradient, 0.0), ops.equal(update, 0.0))
    first_key = np.repeat(np.array(order, "int32") * _KEYS, [sizes[i] for i in order])
    first_key = ops.convert_to_tensor(first_key, "int32")
    keys = [ops.cast(_bin(gradient), "int32"), *(BINS + i for i in range(3))]
    values = [ops.ones_like(gradient), ops.square(after), ops.square(update)]
    values.append(ops.cast(unmoved, "float32"))
    sums = ops.segment_sum(
        ops.concatenate(values),
        ops.concatenate([ops.add(first_key, key) for key in keys]),
        num_segments=len(sizes) * _KEYS,
    )
    sums = ops.reshape(sums, (len(sizes), _KEYS))
    whole = np.array([math.prod(s) / max(n, 1) for s, n in zip(shapes, sizes, strict=True)])
    whole = ops.convert_to_tensor(whole.astype("float32")[:, None])
    counts, norms = sums[:, :BINS], ops.sqrt(sums[:, BINS : BINS + 2] * whole)
    present = ops.sum(counts[:, 1:], axis=1, keepdims=True)
    unmoved_share = sums[:, BINS + 2 :] / ops.maximum(present, 1.0)
    return ops.concatenate([norms, unmoved_share, counts], axis=1)


def _bin(values: Tensor) -> Tensor:
    """int32[n]: the bin of each number, read off its bits: exact, and without a logarithm."""
    bits = ops.right_shift(ops.view(values, "int32"), _MANTISSA)
    exponent = ops.bitwise_and(bits, _EXPONENT_BITS) - _BIAS
    inner = ops.clip(exponent, LOWEST, HIGHEST) - LOWEST + 1
    outer = ops.where(ops.equal(values, 0.0), 0, inner)
    return ops.where(exponent > _BIAS, BINS - 1, outer)

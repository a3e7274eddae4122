"""The float formats: their ranges and their resolutions."""

import dataclasses
from collections.abc import Iterator, Mapping

import ml_dtypes

from kmp import _common

_NAMES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary float format.

    Attributes:
        name: str, as Keras and NumPy write it.
        bits: int, sign, exponent and mantissa together.
        exponent_bits: int.
        mantissa_bits: int, without the implicit leading one.
        largest: float, the largest finite number.
        smallest_normal: float, below which numbers lose precision.
        smallest_subnormal: float, the smallest positive number; half of it rounds to 0.
        eps: float, the distance from 1 to the next larger number.
        decimal_digits: int, how many decimal digits are always preserved.
        bytes: int, the size of a number in memory.

    Example:

    >>> import kmp
    >>> kmp.formats["float16"].largest
    65504.0
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    decimal_digits: int
    bytes: int


def _from_ml_dtypes(name: str) -> Format:
    info = ml_dtypes.finfo(name)
    return Format(
        name=name,
        bits=info.bits,
        exponent_bits=info.bits - 1 - info.nmant,
        mantissa_bits=info.nmant,
        largest=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        eps=float(info.eps),
        decimal_digits=int(info.precision),
        bytes=info.bits // 8,
    )


# Not a dtype: tensor cores round the float32 operands of a product to this format.
_TF32 = dataclasses.replace(
    _from_ml_dtypes("float32"),
    name="tf32",
    bits=19,
    mantissa_bits=10,
    largest=(2 - 2.0**-10) * 2.0**127,
    smallest_subnormal=2.0**-136,
    eps=2.0**-10,
    decimal_digits=3,
)


class Formats(Mapping[str, Format]):
    """The float formats by name, widest first.

    Raises:
        KeyError: for an unknown name; the message lists the known ones.

    Example:

    >>> import kmp
    >>> kmp.formats["bfloat16"].decimal_digits, kmp.formats["bfloat16"].eps
    (2, 0.0078125)

    Source: IEEE 754 (float64, float32, float16); the `ml_dtypes` package (bfloat16; the float8
    formats of Micikevicius et al., "FP8 Formats for Deep Learning", 2022); NVIDIA's A100
    whitepaper (tf32).
    """

    def __init__(self) -> None:
        known = [_from_ml_dtypes(name) for name in _NAMES]
        known.insert(2, _TF32)
        self._formats = {each.name: each for each in known}

    def __getitem__(self, name: str) -> Format:
        if name not in self._formats:
            raise KeyError(
                f"There is no float format {name!r}. The formats are {', '.join(self)}. Write for "
                'example kmp.formats["bfloat16"].'
            )
        return self._formats[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)


formats = Formats()


def table() -> str:
    """The formats as a text table, one per line, as `python -m kmp formats` prints it."""
    columns = [field.name for field in dataclasses.fields(Format)]
    rows = [
        [f"{x:.5g}" if isinstance(x, float) else str(x) for x in dataclasses.astuple(each)]
        for each in formats.values()
    ]
    return _common.table([columns, *rows])

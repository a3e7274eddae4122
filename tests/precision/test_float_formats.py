"""The table of float formats, against NumPy's and against arithmetic in the formats."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from processes import environment

import kmp
from kmp.precision.float_formats import table

pytestmark = pytest.mark.any_backend

STORED = [name for name in kmp.formats if name != "tf32"]


@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
def test_ieee_formats_agree_with_numpy(name):
    mine, theirs = kmp.formats[name], np.finfo(name)
    assert (mine.largest, mine.eps) == (float(theirs.max), float(theirs.eps))
    assert mine.smallest_normal == float(theirs.smallest_normal)
    assert mine.smallest_subnormal == float(theirs.smallest_subnormal)
    assert (mine.bits, mine.mantissa_bits) == (theirs.bits, theirs.nmant)
    assert mine.exponent_bits == theirs.iexp


@pytest.mark.parametrize("name", STORED)
def test_a_format_is_what_its_arithmetic_does(name):
    """The definitions, one by one, by rounding float64 numbers to the format."""
    form, dtype = kmp.formats[name], ml_dtypes.finfo(name).dtype

    def stored(x):
        return float(np.asarray(x, "float64").astype(dtype))

    assert stored(form.largest) == form.largest
    assert stored(1 + form.eps) == 1 + form.eps and stored(1 + form.eps / 4) == 1
    assert stored(form.smallest_subnormal) == form.smallest_subnormal > 0
    assert stored(form.smallest_subnormal / 4) == 0
    assert form.bytes == dtype.itemsize and form.bits == 8 * form.bytes
    assert form.bits == 1 + form.exponent_bits + form.mantissa_bits
    assert form.smallest_subnormal == form.smallest_normal * form.eps


def test_tf32_has_the_range_of_float32_and_the_precision_of_float16():
    tf32, float32, float16 = (kmp.formats[x] for x in ("tf32", "float32", "float16"))
    assert (tf32.exponent_bits, tf32.mantissa_bits) == (8, 10)
    assert (tf32.eps, tf32.smallest_normal) == (float16.eps, float32.smallest_normal)
    assert tf32.bits == 19 and tf32.bytes == 4
    assert float32.largest * (1 - 2**-10) < tf32.largest < float32.largest
    assert tf32.smallest_subnormal == tf32.smallest_normal * tf32.eps


def test_an_unknown_format_is_answered_by_the_known_ones():
    with pytest.raises(KeyError, match=r"no float format .*fp16.*bfloat16, float16"):
        kmp.formats["fp16"]


def test_formats_are_a_read_only_mapping():
    assert list(kmp.formats) == list(dict(kmp.formats)) and len(kmp.formats) == 7
    with pytest.raises(TypeError):
        kmp.formats["float16"] = None
    with pytest.raises(AttributeError):
        kmp.formats["float16"].bits = 8


@pytest.mark.slow
def test_the_table_is_printed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kmp", "formats"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == table()
    header, *rows = done.stdout.strip().splitlines()
    assert [row.split()[0] for row in rows] == list(kmp.formats)
    assert header.split()[-2:] == ["decimal_digits", "bytes"]
    assert "65504" in done.stdout

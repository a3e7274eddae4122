"""Two one-sided tests, against SciPy's own t tests."""

import math
import sys

import numpy as np
import pytest
from scipy import stats

from kmp.cli.equivalence import equivalence

pytestmark = pytest.mark.any_backend


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("runs", [2, 5, 10])
def test_the_verdict_is_that_of_scipys_two_tests(seed, runs):
    """Means and spreads around the margin, so that both verdicts come up."""
    random = np.random.default_rng([seed, runs])
    differences = random.normal(random.uniform(-1, 1), random.uniform(0.1, 1), runs).tolist()
    found = equivalence(differences, margin=1.0)
    lower = stats.ttest_1samp(differences, -1.0, alternative="greater").pvalue
    upper = stats.ttest_1samp(differences, 1.0, alternative="less").pvalue
    interval = stats.ttest_1samp(differences, 0.0).confidence_interval(0.9)
    assert found.p_value == pytest.approx(max(lower, upper), abs=1e-12)
    assert found.equivalent == (max(lower, upper) < 0.05)
    assert (found.low, found.high) == pytest.approx(tuple(interval))
    assert found.equivalent == (found.low > -1.0 and found.high < 1.0)


def test_both_verdicts_come_up():
    good, bad = equivalence([0.1, -0.1, 0.0], 1.0), equivalence([0.9, 1.1, 1.0], 1.0)
    assert good.equivalent and not bad.equivalent
    assert bad.p_value == pytest.approx(0.5)  # on the margin itself


@pytest.mark.parametrize("sign", [1, -1])
def test_better_is_not_equal_either(sign):
    assert not equivalence([sign * 2.0, sign * 2.1, sign * 1.9], 1.0).equivalent


@pytest.mark.parametrize(
    "difference, p_value", [(0.0, 0.0), (0.5, 0.0), (-0.5, 0.0), (1.0, 1.0), (-2.0, 1.0)]
)
def test_differences_without_spread(difference, p_value):
    found = equivalence([difference] * 3, 1.0)
    assert (found.low, found.mean, found.high) == (difference,) * 3
    assert (found.p_value, found.equivalent) == (p_value, p_value < 0.05)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_run_that_is_lost_is_not_equivalent(bad):
    found = equivalence([0.0, 0.0, bad, 0.0], 1.0)
    assert not found.equivalent and math.isnan(found.mean) and found.p_value == 1.0


def test_one_run_is_no_evidence():
    with pytest.raises(ValueError, match=r"at least two runs.*Received: 1 of them.*five seeds"):
        equivalence([0.0], 1.0)


@pytest.mark.parametrize("margin", [0.0, -1.0, math.inf, math.nan])
def test_the_margin_is_a_positive_number(margin):
    with pytest.raises(ValueError, match="`margin` must be a positive number"):
        equivalence([0.0, 0.0], margin)


def test_a_missing_scipy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kmp\[examples\]'"):
        equivalence([0.0, 0.1], 1.0)

"""What training costs."""

import pytest

from kmp.cli.costs import spread

pytestmark = pytest.mark.any_backend


def test_the_spread_is_the_quartiles():
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == (3.0, 2.0, 4.0)

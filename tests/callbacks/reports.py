"""Looks at runs that nothing trains: for detectors, which are told all they ask."""

import math
from types import SimpleNamespace

from kmp.callbacks.verdict.detectors import detectors, judge
from kmp.callbacks.verdict.observation import Observation, Run


class Told(Run):
    """A run with this learning rate and weight decay, and no state to be ruined."""

    optimizer = SimpleNamespace(global_clipnorm=None)

    def __init__(self, learning_rate=math.nan, weight_decay=0.0, first_loss=None, first_norms=None):
        self.rate, self.decay = learning_rate, weight_decay
        self.first_loss, self.first_norms = first_loss, first_norms or {}

    def learning_rate(self, paths):
        return self.rate

    def weight_decay(self):
        return self.decay

    def nonfinite_state(self, layers):
        return []

    def moving_variances(self, layers):
        return []

    def remembered_gradients(self):
        return {}


def look_at(report, learning_rate=math.nan, weight_decay=0.0, run=None, **kwargs):
    return Observation(report, run or Told(learning_rate, weight_decay), **kwargs)


def verdict_on(*looks):
    """The verdict of new detectors on the last of these looks."""
    watching = detectors()
    return [judge(watching, look) for look in looks][-1]

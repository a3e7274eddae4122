"""What every detector of a verdict has."""

import abc

from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict


class Detector(abc.ABC):
    """One cause of a verdict: what it remembers, when it speaks, and its words.

    A detector lives as long as the callback watches the same run, over several calls of `fit`. One
    that is to begin anew with each of them remembers `look.fit_start`, and asks whether a look has
    another, as `FrozenWeights` does.
    """

    @abc.abstractmethod
    def see(self, look: Observation) -> Verdict | None:
        """Take in a look; return a verdict if the cause is there.

        Every detector sees every look, also if one before it in the list has spoken.
        """


def named(paths: list[str]) -> str:
    """The first paths, for a sentence."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")

"""The looks of one `fit`, for the heat map."""

from kmp.callbacks.curves.heat_map import Look
from kmp.health.measure import L2_NORM
from kmp.health.report import GradientReport
from kmp.health.telemetry import OVERFLOW_STEPS

_LOOKS = 60  # columns of the heat map


class History:
    """The last 60 looks.

    Args:
        before: the report at the beginning, whose overflows are not this run's; None if the run is
            new.

    Attributes:
        paths: the variables' paths.
        looks: list of `Look`, the latest last.

    Example:

    >>> history = History()
    >>> history.add(GradientReport(("a",), np.ones((1, 5), "float32"), 1024.0, 10, 0, 0))
    >>> history.paths, history.looks[-1].step
    (('a',), 10)
    """

    def __init__(self, before: GradientReport | None = None):
        self.paths: tuple[str, ...] = ()
        self.looks: list[Look] = []
        self._overflows = before.matrix[:, OVERFLOW_STEPS].copy() if before else 0

    def add(self, report: GradientReport) -> None:
        """Keep what the heat map shows of a report."""
        overflows = report.matrix[:, OVERFLOW_STEPS]
        look = Look(report.step, report.matrix[:, L2_NORM], overflows > self._overflows)
        self.paths, self.looks = report.paths, [*self.looks, look][-_LOOKS:]
        self._overflows = overflows.copy()

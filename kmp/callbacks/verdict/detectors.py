"""The verdict on a run: each of its causes is a detector, and their order is the priority."""

from kmp.callbacks.verdict.large_steps import (
    ExplodingGradients,
    HugeBatch,
    LargeUpdates,
    RisenLoss,
    SpikeBudget,
    UpdateSlowdown,
    told_spikes,
)
from kmp.callbacks.verdict.loss_scale import (
    AllSkipped,
    BrokenGradients,
    Calibrating,
    Collapsed,
    LostAtFloor,
    OverflowRate,
    Underflow,
)
from kmp.callbacks.verdict.nonfinite import (
    ForwardNaN,
    NonfiniteState,
    NonfiniteWeights,
    RuinedVariance,
)
from kmp.callbacks.verdict.observation import Detector, Observation
from kmp.callbacks.verdict.stalled import (
    ClippedWhileScaled,
    FrozenWeights,
    InsensitiveLoss,
    NoSteps,
    NothingToTrain,
    UnscaledLoss,
    VanishedWeights,
    ZeroGradients,
)
from kmp.callbacks.verdict.states import Verdict


def detectors() -> list[Detector]:
    """New detectors for a run. Of several that speak, the first in this list is the verdict."""
    return [
        ForwardNaN(),
        Collapsed(),
        NothingToTrain(),
        NoSteps(),
        UnscaledLoss(),
        ClippedWhileScaled(),
        AllSkipped(),
        FrozenWeights(),
        NonfiniteWeights(),
        NonfiniteState(),
        RuinedVariance(),
        UpdateSlowdown(),
        VanishedWeights(),
        ZeroGradients(),
        InsensitiveLoss(),
        BrokenGradients(),
        SpikeBudget(),
        HugeBatch(),
        RisenLoss(),
        Calibrating(),
        OverflowRate(),
        LostAtFloor(),
        ExplodingGradients(),
        LargeUpdates(),
        Underflow(),
    ]


def judge(watching: list[Detector], look: Observation) -> Verdict:
    """Show a look to all detectors, and return the verdict of the first that speaks."""
    spoken = [detector.see(look) for detector in watching]
    return next(filter(None, spoken), healthy(look))


def healthy(look: Observation) -> Verdict:
    """The verdict if no detector speaks."""
    report, skipped = look.report, "0 skipped"
    spikes, advice = told_spikes(look)
    if report.skipped_steps:
        before = report.skipped_steps - look.skips
        skipped = f"{look.skips} of the last {look.steps} steps skipped{spikes}, {before} before"
    if look.num_held:
        steps = "1 step" if look.num_held == 1 else f"{look.num_held} steps"
        skipped += f", batch statistics held in {steps}"
        advice = advice or "Look at the batches of those steps: their inputs are far too large."
    return Verdict("HEALTHY", "", f"loss scale {report.loss_scale:g}, {skipped}", advice)

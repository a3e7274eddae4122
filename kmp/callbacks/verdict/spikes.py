"""The detector of steps that are left out as spikes again and again, and the words for a few."""

from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict


class SpikeBudget(Detector):
    """UNSTABLE: so many steps were left out as spikes that large gradients are applied again."""

    def see(self, look: Observation) -> Verdict | None:
        if not look.spikes or look.report.spike_limit is not None:
            return None
        return Verdict(
            "UNSTABLE",
            look.spikes[0].variable,
            f"{look.num_spikes} of the last {look.steps} steps were left out as spikes. Their "
            "budget is spent: gradients of that size are applied now",
            "They are not rare. If the data have changed, go on: the limit has followed them. If "
            "many batches are bad, look at them, or clip with global_clipnorm=1.0.",
        )


def told_spikes(look: Observation) -> tuple[str, str]:
    """What a sound run says of the steps of this epoch that were left out, and what to do."""
    if not look.spikes:
        return "", ""
    steps = ", ".join(str(event.step) for event in look.spikes[:3])
    most = max(look.spikes, key=lambda event: event.norm / event.limit)
    return (
        f", {look.num_spikes} of them as spikes (step {steps}"
        + (", ..." if look.num_spikes > 3 else "")
        + f"; gradients up to {most.norm / most.limit:.2g} times the limit, most in "
        f"{most.variable})",
        "Look at the batches of the spikes: they are bad, or rare and important.",
    )

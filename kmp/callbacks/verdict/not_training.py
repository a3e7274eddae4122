"""Detectors of runs that cannot train at all, whatever the data."""

from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict


class NothingToTrain(Detector):
    """STALLED: the optimizer has no weights."""

    def see(self, look: Observation) -> Verdict | None:
        if look.report.paths:
            return None
        return Verdict(
            "STALLED",
            "",
            "the optimizer has no weight to train: all were frozen when it was built",
            "Set layer.trainable = True for some of them, and compile the model again.",
        )


class UnscaledLoss(Detector):
    """STALLED: gradients are divided by a scale that nothing has multiplied the loss by."""

    def see(self, look: Observation) -> Verdict | None:
        report = look.report
        if not report.step or report.loss_is_scaled:
            return None
        return Verdict(
            "STALLED",
            "",
            f"nothing scales the loss, but gradients are divided by a loss scale of "
            f"{report.loss_scale:g}",
            "In your train_step, write loss = self.optimizer.scale_loss(loss) before taking "
            'gradients; or kmp.scaled(..., loss_scale="none").',
        )

"""Detectors of runs that cannot train at all, whatever the data."""

from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict

_PATIENCE = 20  # batches between two steps of an optimizer that does step


class NothingToTrain(Detector):
    """STALLED: the optimizer has no weights, or none that holds a number."""

    def see(self, look: Observation) -> Verdict | None:
        paths, weights = look.report.paths, look.weights
        if not all(path in weights and weights[path].is_empty for path in paths):
            return None
        if any(not weight.is_empty for weight in weights.values()):
            return Verdict(
                "STALLED",
                "",
                "the optimizer has no weight to train: all were frozen when it was built",
                "Set layer.trainable = True for some of them, and compile the model again.",
            )
        if paths:
            return Verdict(
                "STALLED",
                paths[0],
                "there is nothing to train: all trainable weights of the model are empty",
                "Look for an axis of size 0, in the inputs or in the arguments of a layer.",
            )
        return Verdict(
            "STALLED",
            "",
            "there is nothing to train: the model has no trainable weights",
            "If it is to learn, add a layer that has some, such as keras.layers.Dense. For the "
            "loss alone call model.evaluate.",
        )


class NoSteps(Detector):
    """STALLED: batches go by, and the optimizer takes no step, not even one that is skipped.

    An optimizer that has stepped before may take only every few batches, as a generator's does.
    """

    def __init__(self):
        self._step = self._batches = 0  # the last step; batches that have gone by since

    def see(self, look: Observation) -> Verdict | None:
        step = look.report.step
        self._batches = look.batches + (self._batches if step == self._step else 0)
        took_one, self._step = step != self._step, step
        if took_one or not look.report.paths:
            return None
        return no_steps(self._batches) if self._batches >= (_PATIENCE if step else 2) else None


def no_steps(batches: int) -> Verdict:
    """STALLED, for an optimizer that took no step in so many batches."""
    return Verdict(
        "STALLED",
        "",
        f"the optimizer took no step in the last {batches} batches",
        "Your train_step has to hand it the gradients: write self.optimizer.apply(gradients, "
        "self.trainable_variables), or on JAX self.optimizer.stateless_apply(...), and return the "
        "variables that it gives. If another optimizer trains the model, watch that one: "
        "GradientHealth(optimizer=...).",
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


_NOTHING = 1e-6  # l2 norm of a kernel or an embedding


class VanishedWeights(Detector):
    """STALLED: half of the weight matrices have norms of next to nothing.

    Where a matrix begins at zero, as an adapter's does, its first update is larger.
    """

    def see(self, look: Observation) -> Verdict | None:
        weights, norms = look.weights, look.report.weight_norm
        matrices = {x: norm for x, norm in norms.items() if x in weights and weights[x].is_matrix}
        gone = [path for path, norm in matrices.items() if 0 < norm < _NOTHING]
        if not gone or 2 * len(gone) < len(matrices):
            return None
        return Verdict(
            "STALLED",
            gone[0],
            f"{len(gone)} of {len(matrices)} weights, biases aside, have norms below {_NOTHING:g}",
            "Weight decay or a regularizer has taken them to nothing: lower it. Optimizers "
            "multiply weight_decay with the learning rate.",
        )

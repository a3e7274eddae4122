"""The detector of weights that weight decay has taken to nothing."""

from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict

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

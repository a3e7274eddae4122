"""The search for the fewest layers that have to stay in float32."""

import math
from typing import Any

import keras

from kmp._backend.types import Tree
from kmp._keras import path_of
from kmp.debug.blame import Blame
from kmp.debug.nonfinite import first_blame
from kmp.debug.policies import Unit, units_of
from kmp.debug.precisions import output_sqnr, quality_of
from kmp.debug.preserved import Preserved
from kmp.debug.replay import Batch, call_model, raising_layer
from kmp.precision.temporary import under_map


class Search:
    """The layers that are kept in float32, and what that gives."""

    def __init__(
        self,
        model: keras.Model,
        batch: Batch,
        outputs: Tree,
        policy: str,
        target: float,
        preserved: Preserved,
    ):
        self.model, self.batch, self.outputs = model, batch, outputs
        self.policy, self.target, self.preserved = policy, target, preserved
        self.dtype = keras.dtype_policies.get(policy).compute_dtype
        self.units = units_of(model)
        self.kept: list[Unit] = []
        self._measured: dict[frozenset[Unit], float] = {}
        self.before = self.sqnr()

    def policies(self) -> keras.dtype_policies.DTypePolicyMap:
        """The map: float32 for the paths of the layers that are kept, the policy for all others."""
        paths = [
            path_of(layer)  # the name of a layer without one, for `to_mixed_precision`
            for unit in self.kept
            for layer in unit.layers
            if layer.path or layer is unit.head
        ]
        full = keras.dtype_policies.get("float32")
        # As a dict: a layer that two units share would be set twice, which a map refuses.
        return keras.dtype_policies.DTypePolicyMap(
            keras.dtype_policies.get(self.policy), dict.fromkeys(paths, full)
        )

    def without_path(self) -> list[keras.Layer]:
        """The layers that are kept and that no map reaches, those inside other layers included."""
        kept = {id(layer): layer for unit in self.kept for layer in unit.layers}
        return [layer for layer in kept.values() if not layer.path]

    def swapped(self) -> Any:
        """Within, the model computes as the map says."""
        return under_map(self.model, self.policies(), self.without_path())

    def sqnr(self) -> float:
        """dB of the output under the map; NaN where the model does not run so."""
        kept = frozenset(self.kept)
        if kept not in self._measured:
            self._measured[kept] = quality_of(
                self.model, self.batch[0], self.outputs, self.swapped, self.preserved
            )
        return self._measured[kept]

    def keep_for_the_output(self, verbose: int) -> None:
        """Keep the worst until the target is reached, then drop what it does not need."""
        progress = keras.utils.Progbar(len(self.units), verbose=verbose, unit_name="layer")
        cost = {}
        for unit in self.units:
            alone = output_sqnr(
                self.model, self.batch[0], self.outputs, self.policy, unit, self.preserved
            )
            cost[unit] = math.inf if math.isnan(alone) else alone
            progress.add(1)
        ranked = sorted(self.units, key=cost.__getitem__)
        while not self.sqnr() >= self.target and len(self.kept) < len(ranked):
            self.kept.append(ranked[len(self.kept)])
        for unit in self.kept[::-1]:
            before = self.kept
            self.kept = [other for other in before if other is not unit]
            if not self.sqnr() >= self.target:
                self.kept = before
        if math.isnan(self.sqnr()):
            self._run()  # raises what the comparison has swallowed

    def _run(self) -> Tree:
        self.preserved.restore()
        with self.swapped():
            return call_model(self.model, self.batch[0], training=False)

    def keep_for_the_gradients(self, scale: float) -> bool:
        """Keep what overflows or raises in training; tell whether all is finite in the end."""
        for _ in range(len(self.units) + 1):
            with self.swapped():
                bad, unit = self._first_bad(scale)
            if not bad:
                return True
            if unit is None or unit in self.kept:
                return False
            self.kept.append(unit)
            if math.isnan(self.sqnr()):  # the model does not run so
                self.kept.pop()
                return False
        return False

    def _first_bad(self, scale: float) -> tuple[bool, Unit | None]:
        """Whether a training step overflows or raises, and the unit that is to blame."""
        try:
            blame = first_blame(self.model, self.batch, scale, self.preserved)
        except Exception:
            self.preserved.restore()
            unit = self._unit_of(raising_layer(self.model, self.batch)) or self._regularized()
            if unit is None or unit in self.kept:
                raise
            return True, unit
        if blame is None:
            return False, None
        if blame.phase == "loss":
            return True, self._taken_by_the_loss(blame)
        to_keep = blame.call or blame.after
        return True, self._unit_of(to_keep.layer) if to_keep else None

    def _taken_by_the_loss(self, blame: Blame) -> Unit | None:
        """The unit before the code of a loss, which computes in what layers return.

        If that is none, or is kept already, the last of the others.
        """
        unit = self._unit_of(blame.after.layer) if blame.after else None
        if unit is None or unit in self.kept:
            unit = next((x for x in reversed(self.units) if x not in self.kept), None)
        return unit

    def _regularized(self) -> Unit | None:
        """A unit with an activity regularizer in half precision, which the losses may not add."""
        for unit in self.units:
            if unit not in self.kept and any(x.activity_regularizer for x in unit.layers):
                return unit
        return None

    def _unit_of(self, layer: Any) -> Unit | None:
        return next((u for u in self.units if any(layer is x for x in u.layers)), None)

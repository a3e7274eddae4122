"""Variables that are split over devices: each device measures the shards that it holds.

What all of them found is then added up. Left to itself, XLA brings together what the devices found
of one variable, variable by variable, and moves samples between devices to line them up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kmp._backend.sharding import Sharding
from kmp._backend.types import Tensor


class MeshSharding(Sharding):
    """Variables that are split over a mesh of devices.

    Args:
        layouts: `NamedSharding` of each variable, all of one mesh.
    """

    def __init__(self, layouts: Sequence[NamedSharding]):
        self._layouts = layouts
        self._mesh = layouts[0].mesh
        self.num_devices = self._mesh.size
        axes = self._mesh.axis_names
        self._is_split = np.array([[axis in _axes_of(x) for axis in axes] for x in layouts])

    def shard_shapes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [x.shard_shape(shape) for x, shape in zip(self._layouts, shapes, strict=True)]

    def constrain(self, place: int, x: Tensor) -> Tensor:
        return jax.lax.with_sharding_constraint(x, self._layouts[place])

    def each(
        self, function: Callable[..., Any], of: Sequence[int | str | None], apart: bool = False
    ) -> Callable[..., Any]:
        one_each = PartitionSpec(self._mesh.axis_names)
        everywhere = PartitionSpec()

        def spec(of: int | str | None) -> PartitionSpec:
            if isinstance(of, int):
                return self._layouts[of].spec
            return one_each if of == self.APART else everywhere

        def run(target: str, *tensors: Tensor) -> Any:
            def on_device(*tensors: Tensor) -> Any:
                return function(target, *tensors)

            # Unchecked: of some operations JAX cannot tell that all devices get the same result.
            return jax.shard_map(
                on_device,
                mesh=self._mesh,
                in_specs=tuple(map(spec, of)),
                out_specs=one_each if apart else everywhere,
                check_vma=False,
            )(*tensors)

        return run

    def eagerly(self) -> Sharding:
        return _EagerSharding(self._mesh)

    def reduced(self, table: Tensor) -> tuple[Tensor, Tensor]:
        # Several devices may hold the same shard. It counts on the first one along the mesh axes
        # that do not split the variable.
        axes = self._mesh.axis_names
        first = jnp.stack([jax.lax.axis_index(axis) == 0 for axis in axes])
        counts = jnp.all(self._is_split | first, axis=1)
        counts = jnp.expand_dims(counts, range(1, table.ndim))
        sums = jax.lax.psum(jnp.where(counts, table, 0), axes)
        return sums, jax.lax.pmax(table, axes)


class _EagerSharding(Sharding):
    def __init__(self, mesh: Any):
        self._everywhere = NamedSharding(mesh, PartitionSpec())

    def replicate(self, x: Tensor) -> Tensor:
        return jax.device_put(x, self._everywhere)


def _axes_of(layout: NamedSharding) -> list[str]:
    """Return the axes of the mesh that split a variable."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in layout.spec)
    return [axis for entry in entries for axis in entry]

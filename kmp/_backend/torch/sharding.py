"""Variables that `keras.distribution.ModelParallel` has made DTensors: split over processes.

Each process measures the shards that it holds, and one small collective for each axis of the mesh
adds up what all have found. Left to themselves, DTensors would run a collective for each reduction,
and gloo's maximum may lose a NaN that only one process has.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kmp._backend.sharding import Sharding
from kmp._backend.types import Tensor


def is_dtensor(x: Any) -> bool:
    """Tell whether a tensor lies on the devices of several processes."""
    module = sys.modules.get("torch.distributed.tensor")  # Keras 3.16 imports it; kmp need not
    return module is not None and isinstance(x, module.DTensor)


def whole(x: Any) -> Any:
    """Bring all of a DTensor to every process, all of which have to call this; others stay."""
    return x.full_tensor() if is_dtensor(x) else x


class Layout(NamedTuple):
    """How a variable lies on a mesh.

    Attributes:
        mesh: `torch.distributed.DeviceMesh`.
        placements: one for each axis of the mesh.
        shard: the shape of what each process holds.
        is_dtensor: whether the variable is one. Keras makes none of those that nothing splits, but
            their gradients may be.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shard: tuple[int, ...]
    is_dtensor: bool


def layouts_of(values: Sequence[Any]) -> list[Layout]:
    """Return how tensors are measured if some of them are DTensors; empty if none is.

    Every process measures all of a tensor that it holds as a whole, whose shards differ in size, or
    that several axes of the mesh split along one dimension.
    """
    meshes = [x.device_mesh for x in values if is_dtensor(x)]
    if not meshes or any(mesh != meshes[0] for mesh in meshes):
        return []
    from torch.distributed.tensor import Replicate

    everywhere = (Replicate(),) * meshes[0].ndim
    return [
        Layout(meshes[0], tuple(x.placements), tuple(x.to_local().shape), True)
        if is_dtensor(x) and _is_even(x)
        else Layout(meshes[0], everywhere, tuple(x.shape), is_dtensor(x))
        for x in values
    ]


def _is_even(x: Any) -> bool:
    """Whether each axis of the mesh splits a dimension of its own into equal parts, or none."""
    axes = [(axis, p.dim) for axis, p in enumerate(x.placements) if p.is_shard()]
    return len({dim for _, dim in axes}) == len(axes) and all(
        x.shape[dim] % x.device_mesh.size(axis) == 0 for axis, dim in axes
    )


class MeshSharding(Sharding):
    """DTensors on a mesh of processes.

    Args:
        layouts: of each variable, all of one mesh.
    """

    def __init__(self, layouts: Sequence[Layout]):
        self._layouts = layouts
        self._mesh = layouts[0].mesh
        first = torch.tensor([x == 0 for x in self._mesh.get_coordinate()])
        split = torch.tensor([[p.is_shard() for p in x.placements] for x in layouts])
        # Several processes may hold the same shard. It counts on the first one along the axes of
        # the mesh that do not split the variable.
        self._counts = (split | first).all(dim=1)

    def shard_shapes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [x.shard for x in self._layouts]

    def constrain(self, place: int, x: Tensor) -> Tensor:
        # Of a batch that is split too, a gradient is still to be summed over the processes.
        layout = self._layouts[place]
        if not is_dtensor(x):
            return x
        x = x.redistribute(layout.mesh, layout.placements)
        return x if layout.is_dtensor else x.to_local()

    def each(
        self, function: Callable[..., Any], of: Sequence[int | str | None], apart: bool = False
    ) -> Callable[..., Any]:
        # The processes run the same program already.
        def run(target: str, *tensors: Any) -> Any:
            pairs = zip(of, tensors, strict=True)
            return function(target, *(self._local(x, place) for place, x in pairs))

        return run

    def _local(self, x: Any, place: int | str | None) -> Any:
        if not isinstance(place, int):
            return whole(x)
        x = self.constrain(place, x)
        return x.to_local() if is_dtensor(x) else x

    def reduced(self, table: Tensor) -> tuple[Tensor, Tensor]:
        counts = self._counts.to(table.device).reshape(-1, *[1] * (table.ndim - 1))
        both = torch.cat([torch.where(counts, table, 0), table])
        for axis in range(self._mesh.ndim):
            group = self._mesh.get_group(axis)
            found = [torch.empty_like(both) for _ in range(group.size())]
            torch.distributed.all_gather(found, both.contiguous(), group=group)
            sums, largest = torch.stack(found).chunk(2, dim=1)
            both = torch.cat([sums.sum(dim=0), largest.amax(dim=0)])
        sums, largest = both.chunk(2)
        return sums, largest

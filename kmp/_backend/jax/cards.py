"""Devices to compile for that are not here: XLA's compilers need only their figures."""

import dataclasses
import os
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Card:
    """NVIDIA's public figures of a card.

    Attributes:
        name: as NVIDIA writes it.
        memory: MiB, as `nvidia-smi` shows them.
        compute: the compute capability.
        cores: streaming multiprocessors.
        units: floating-point units of a multiprocessor.
        threads: of a multiprocessor at most.
        shared, block: KiB of shared memory of a multiprocessor, and of one block at most.
        cache: MiB of its second level.
        bandwidth: GB a second.
        clock: GHz.
    """

    name: str
    memory: int
    compute: tuple[int, int]
    cores: int
    units: int
    threads: int
    shared: int
    block: int
    cache: int
    bandwidth: int
    clock: float


CARDS = {
    "t4": Card("Tesla T4", 15360, (7, 5), 40, 64, 1024, 64, 64, 4, 320, 1.59),
    "l4": Card("NVIDIA L4", 23034, (8, 9), 58, 128, 1536, 100, 99, 48, 300, 2.04),
    "h100": Card("NVIDIA H100 80GB HBM3", 81559, (9, 0), 132, 128, 2048, 228, 227, 50, 3352, 1.98),
}
NAMES = (*CARDS, "v5e")
# Settings of libtpu, which would otherwise look for a TPU and ask the machine for its name.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def device_of(name: str) -> Any:
    """A `jax.Device` that programs can be compiled for, and not run on.

    Args:
        name: one of `NAMES`. "v5e" is one chip of a TPU v5e, and needs the extra `tpu`; the others
            are cards of NVIDIA, and need the extra `h100`.
    """
    from jax.experimental import topologies

    if name == "v5e":
        for variable, value in _NO_TPU.items():
            os.environ.setdefault(variable, value)
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    figures = _figures(CARDS[name])
    found = topologies.get_topology_desc(platform="cuda", target_config=figures, topology="1x1x1")
    return found.devices[0]


def compiled_for(program: Any, device: Any) -> Any:
    """The `jax.stages.Compiled` of a `jax.stages.Lowered`.

    Args:
        program: what was lowered for the device.
        device: one of NVIDIA's, a TPU, or None.
    """
    try:
        return program.compile()
    except jax.errors.JaxRuntimeError:
        # Triton's kernels of a product are written by XLA for tiles that it has tried. Without a
        # card it cannot try any, and of some products it finds none.
        if getattr(device, "platform", None) not in ("cuda", "gpu"):
            raise
        return program.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def _figures(card: Card) -> str:
    """A card as XLA wants it described."""
    major, minor = card.compute
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: 49152
          shared_memory_per_core: {card.shared * 1024}
          threads_per_core_limit: {card.threads}
          core_count: {card.cores}
          fpus_per_core: {card.units}
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: {card.bandwidth * 10**9}
          l2_cache_size: {card.cache * 2**20}
          clock_rate_ghz: {card.clock}
          device_memory_size: {card.memory * 2**20}
          shared_memory_per_block_optin: {card.block * 1024}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
        runtime_version {{ major: 12 minor: 9 patch: 0 }}
        device_description_str: "{card.name}"
    """

"""Fine-tune all of a language model on the eight chips of a TPU v5e-8, sharded.

    python examples/finetune_on_a_tpu.py                     a tiny one, on 8 slices of this CPU
    python examples/finetune_on_a_tpu.py --preset gemma_7b_en --text mine.txt
    python examples/finetune_on_a_tpu.py --preset gemma_7b_en --plan v5e

A chip has 16 GB. The 8.5 billion parameters of Gemma 7B take 102 GB in mixed bfloat16, before
anything is computed. With weights and AdamW's slots in bfloat16, updated in float32 and rounded at
random, they take 51 GB, and each chip holds an eighth: `keras.distribution.ModelParallel` splits
kernels by the layouts that keras-hub has for Gemma. kmp needs no change for that. bfloat16 needs no
loss scale; if any gradient on any chip is not finite, all chips skip the step.

--plan asks the TPU's own compiler for the bytes of one chip, without a TPU, and without weights. It
needs kmp's extra `tpu` (Linux on x86-64). --method, --text, --save and the other options are those
of finetune_language_model.py, which does the rest. Needs `pip install keras-hub`, and JAX.
"""

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
# Eight devices out of one CPU; where there is a TPU JAX takes its chips.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import finetune_language_model as finetune
import keras
import keras_hub
import memory_plan

CHIPS = 8


def layouts_of(mesh: keras.distribution.DeviceMesh) -> keras.distribution.LayoutMap:
    """How Gemma's weights are split: by heads, hidden features and words, over both axes."""
    return keras_hub.models.GemmaBackbone.get_layout_map(mesh)


def distribute(shape: tuple[int, int]) -> None:
    """All that is made from now on lies on a mesh of this shape: copies of the model, parts."""
    devices = keras.distribution.list_devices()[:CHIPS]
    mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), devices)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts_of(mesh), batch_dim_name="batch")
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Plan, or train."""
    parser = finetune.make_parser(__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=1, help="the batch is shared out among them")
    parser.set_defaults(method="half", batch=8)
    arguments = finetune.parse(parser, argv)
    shape = (arguments.copies, CHIPS // arguments.copies)
    if arguments.plan and not memory_plan.is_ready():
        sys.exit(memory_plan.again())
    if arguments.plan:
        found = finetune.plan(arguments, mesh_shape=shape, layouts=layouts_of)
        print(f"{arguments.method}, of one chip of {found}")
        return
    if keras.backend.backend() != "jax":
        print(f"On {keras.backend.backend()} nothing is sharded here: set KERAS_BACKEND=jax.")
        return
    distribute(shape)
    model = finetune.train(arguments)
    whole = sum(v.value.nbytes for v in model.variables)
    first = sum(v.value.addressable_shards[0].data.nbytes for v in model.variables)
    print(f"The first of {CHIPS} devices holds {first:,} of {whole:,} bytes of weights")


if __name__ == "__main__":
    main()

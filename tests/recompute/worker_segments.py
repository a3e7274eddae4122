"""One process of test_recomputed_devices.py: a flat model under DistributedDataParallel.

    python worker_segments.py RANK MEETING_POINT RESULTS.npz

RESULTS gets the weights, statistics and slots after three steps on the data of this rank, with
segments computed again ("again ...") and without ("plain ...").
"""

import datetime
import os
import sys

import keras
import numpy as np
import torch
from flat_models import ROWS, batches, stack
from recomputed_models import loss, state

import kmp


def main(rank, meeting_point, results):
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=int(rank),
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    found = {}
    for name in ("plain", "again"):
        values = train(int(rank), name == "again")
        found |= {f"{name} {i} {path}": x for i, (path, x) in enumerate(values)}
    np.savez(results, **found)
    torch.distributed.destroy_process_group()
    # Now and then CPython never ends its last garbage collection after DistributedDataParallel.
    os._exit(0)


def train(rank, recomputed):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = stack()
    if recomputed:
        assert len(kmp.recompute(model).rows) > 1
    model.compile(kmp.scaled(keras.optimizers.SGD(0.1, momentum=0.9)), loss())
    model.optimizer.build(model.trainable_variables)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    keras.utils.set_random_seed(rank)  # each draws masks of its own
    x, y = batches(model, 6)
    for step in range(3):
        rows = slice((2 * step + rank) * ROWS, (2 * step + rank + 1) * ROWS)
        model.zero_grad()
        inputs = keras.ops.convert_to_tensor(x[rows])
        outputs = parallel(inputs, training=True)
        value = model.compute_loss(y=keras.ops.convert_to_tensor(y[rows]), y_pred=outputs)
        model.optimizer.scale_loss(value).backward()
        gradients = [v.value.grad for v in model.trainable_variables]
        with torch.no_grad():
            model.optimizer.apply(gradients, model.trainable_variables)
    return state(model)


if __name__ == "__main__":
    main(*sys.argv[1:])

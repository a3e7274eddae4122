"""One process of test_multi_worker.py under torch.distributed.

    python worker_torch.py RANK MEETING_POINT RESULTS.jsonl REDUCTION WINDOW CASE...

See worker_tensorflow.py for CASE and RESULTS. REDUCTION says who averages the gradients: "ddp",
"nan_loss" (the same, and bad batches have a loss of NaN), "all_reduce" (this loop), "none", or
"fit" for none in a `fit` on each process at the end, with one `log_dir` beside RESULTS. WINDOW is
the number of micro-batches in a step.
"""

import datetime
import json
import os
import sys

import keras
import numpy as np
import torch

import kmp


def main(rank, meeting_point, results, reduction, window, *cases):
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=int(rank),
        world_size=2,
        timeout=datetime.timedelta(seconds=20),
    )
    steps = int(window) if int(window) > 1 else None
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.float32([[1.0], [2.0]])])
    inner = keras.optimizers.SGD(0.5, momentum=0.5, gradient_accumulation_steps=steps)
    optimizer = kmp.LossScaleOptimizer(inner, initial_scale=1024.0)
    optimizer.build(model.trainable_variables)
    is_ddp = reduction in ("ddp", "nan_loss")
    forward = torch.nn.parallel.DistributedDataParallel(model) if is_ddp else model
    for case in cases:
        x = np.float32([[1.0 + int(rank), -0.5]])
        if rank in case:
            # The loss is finite, its scaled gradient is not; or both are NaN.
            x[0, 1] = np.nan if reduction == "nan_loss" else 1e37
        model.zero_grad()
        optimizer.scale_loss(forward(torch.from_numpy(x)).sum()).backward()
        gradients = [v.value.grad for v in model.trainable_variables]
        with torch.no_grad():
            if reduction == "all_reduce":
                for gradient in gradients:
                    torch.distributed.all_reduce(gradient)
                    gradient /= 2
            optimizer.apply(gradients, model.trainable_variables)
        with open(results, "a") as file:
            print(json.dumps(state(model, optimizer)), file=file)
    if reduction == "fit":
        fit(os.path.join(os.path.dirname(results), "logs"))
    torch.distributed.destroy_process_group()
    # Now and then CPython never ends its last garbage collection after DistributedDataParallel.
    os._exit(0)


def fit(log_dir):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), "mse")
    watch = kmp.callbacks.GradientHealth(log_dir=log_dir)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[watch], verbose=0)


def state(model, optimizer):
    variables = model.variables + optimizer.variables
    return {v.path: keras.ops.convert_to_numpy(v).tolist() for v in variables}


if __name__ == "__main__":
    main(*sys.argv[1:])

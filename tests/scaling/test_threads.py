"""One optimizer whose step is traced in several threads at once."""

import threading

import keras
import numpy as np
import pytest
from keras import ops
from oracle import COMPILED_MODES, compiled

import kmp

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_three_threads_trace_one_step(mode, accumulation):
    optimizer = kmp.scaled("adam", 8.0, learning_rate=0.5, gradient_accumulation_steps=accumulation)
    variables = [keras.Variable(np.ones(3, "float32")) for _ in range(40)]
    optimizer.build(variables)
    optimizer.scale_loss(0.0)
    gradients = [ops.ones(3) for _ in variables]
    start, failures = threading.Barrier(3), []

    def trace():
        try:
            start.wait()
            if mode == "jit":
                values = [v.value for v in optimizer.variables], gradients, gradients
                compiled(lambda *args: optimizer.stateless_apply(*args), mode).lower(*values)
            else:
                step = compiled(lambda grads: optimizer.apply(grads, variables), mode)
                step.get_concrete_function(gradients)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=trace) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert not any("assign" in vars(v.value) for v in variables if hasattr(v.value, "__dict__"))

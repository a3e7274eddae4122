"""What several tests share: answers that use none of kmp's code, and the ways to run a function."""

import contextlib
import pathlib

import keras
import numpy as np
import pytest

BACKEND = keras.backend.backend()
MODES = {
    "tensorflow": ["eager", "graph", "xla"],
    "jax": ["eager", "jit"],
    "torch": ["eager"],
}[BACKEND]
COMPILED_MODES = [mode for mode in MODES if mode != "eager"]


def few(values, *kept):
    """Parameters of a test: `make test` runs those in `kept`, `make test-all` the others too."""
    return [x if x in kept else pytest.param(x, marks=pytest.mark.wide) for x in values]


def may_leave_convolutions_to_onednn():
    """Whether TensorFlow may have oneDNN compute those in bfloat16, which adds up in float32.

    It does so on CPUs with AVX-512, unless oneDNN is switched off.
    """
    if BACKEND != "tensorflow":
        return False
    from tensorflow.python.util import _pywrap_util_port as built

    cpu = pathlib.Path("/proc/cpuinfo")
    return built.IsMklEnabled() and cpu.exists() and "avx512f" in cpu.read_text()


@contextlib.contextmanager
def compilations():
    """The programs that JAX compiles meanwhile."""
    import jax

    heard = []

    def listen(event, seconds, **details):
        if "backend_compile" in event:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield heard
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def compiled(function, mode):
    """`function` as the backend runs it in `mode`."""
    if mode == "eager":
        return function
    if mode == "jit":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=mode == "xla")


def number(x):
    """A scalar tensor or variable as a NumPy scalar of its own dtype."""
    return keras.ops.convert_to_numpy(x)[()]


def loss_scales(
    finite,
    initial_scale=2.0**15,
    growth_factor=2.0,
    backoff_factor=0.5,
    min_scale=2.0**-48,
    max_scale=2.0**24,
    hysteresis=1,
    *,
    growth_interval,
):
    """The loss scale after each step, in the words of the documentation and in float32."""
    scale, good, bad = np.float32(initial_scale), 0, 0
    scales = []
    for step in finite:
        if step:
            good, bad = good + 1, 0
            if good >= growth_interval:
                with np.errstate(over="ignore"):
                    scale = min(scale * np.float32(growth_factor), np.float32(max_scale))
                good = 0
        else:
            good, bad = 0, bad + 1
            if bad >= hysteresis:
                scale = max(scale * np.float32(backoff_factor), np.float32(min_scale))
        scales.append(scale)
    return np.array(scales, "float32")


class Run:
    """A kernel, a bias and an optimizer that take true gradients step by step, in one mode.

    An optimizer that scales the loss is given the gradients times its present scale, which is what
    backpropagation of a scaled loss ends in.
    """

    def __init__(self, optimizer, mode="eager", variables=None):
        random = np.random.default_rng(11)
        self.variables = variables or [
            keras.Variable(random.normal(size=shape).astype("float32"), name=name)
            for name, shape in (("kernel", (4, 3)), ("bias", (3,)))
        ]
        self.optimizer, self.mode = optimizer, mode
        optimizer.build(self.variables)
        self._start = [np.array(keras.ops.convert_to_numpy(v)) for v in self._all()]
        if mode == "jit":
            self._step = compiled(optimizer.stateless_apply, mode)
        else:
            self._step = compiled(lambda grads: optimizer.apply(grads, self.variables), mode)

    @property
    def inner(self):
        return getattr(self.optimizer, "inner_optimizer", self.optimizer)

    def restart(self):
        """Put every variable back to where it began; what has been compiled stays."""
        for variable, value in zip(self._all(), self._start, strict=True):
            variable.assign(value)

    def _all(self):
        return self.variables + self.optimizer.variables

    def step(self, gradients):
        """Take one step; None stands for a variable without a gradient."""
        scale = 1.0
        if self.inner is not self.optimizer:
            scale = number(self.optimizer.dynamic_scale)
        with np.errstate(over="ignore", invalid="ignore"):
            wide = [np.float64 if v.dtype == "float64" else np.float32 for v in self.variables]
            gradients = [
                None if g is None else keras.ops.convert_to_tensor(dtype(g) * dtype(scale))
                for g, dtype in zip(gradients, wide, strict=False)  # one test gives too few
            ]
        if self.mode != "jit":
            self._step(gradients)
            return
        values = [v.value for v in self.variables]
        values, state = self._step([v.value for v in self.optimizer.variables], gradients, values)
        pairs = zip(self.variables + self.optimizer.variables, values + state, strict=True)
        for variable, value in pairs:
            variable.assign(value)

    def state(self):
        """What a skipped step must not touch, a variable that Nadam hides in itself included."""
        inner = self.inner
        attributes = [v for v in vars(inner).values() if isinstance(v, keras.Variable)]
        others = {id(v): v for v in [*inner.variables, *attributes]}.values()
        # Adafactor's placeholders for vectors, which are never written, bear the vector's name.
        others = [v for v in others if v.path not in [x.path for x in self.variables]]
        state = {f"{i}: {v.path}": v for i, v in enumerate(others)}
        state.update({v.path: v for v in self.variables})
        return {name: keras.ops.convert_to_numpy(v.value) for name, v in state.items()}


def assert_same(left, right):
    """Bit for bit; the optimizers' names may differ."""
    assert len(left) == len(right)
    for (name, a), (_, b) in zip(left.items(), right.items(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def assert_close(left, right):
    """Equal up to some last bits of float32, for numbers near 1 that a few steps have summed."""
    assert len(left) == len(right)
    for (name, a), (_, b) in zip(left.items(), right.items(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)


def random_gradients(steps, seed=0):
    random = np.random.default_rng(seed)
    return [
        [random.normal(size=shape).astype("float32") for shape in ((4, 3), (3,))]
        for _ in range(steps)
    ]

"""keras.applications: convert, train two steps, save, load and predict alike."""

import pathlib

import pytest
import train_application
from oracle import BACKEND
from processes import environment, run_all

pytestmark = pytest.mark.slow

PROGRAM = pathlib.Path(train_application.__file__)
# What is tested does not depend on how well XLA optimizes, and its compiler takes the time. On
# JAX alone: TensorFlow, which runs it eagerly, needs no process of its own.
QUICK_COMPILER = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


# On JAX the others compile for a minute each.
ON_TENSORFLOW = [
    pytest.param(name, marks=pytest.mark.only("tensorflow"))
    for name in ("ResNet50", "EfficientNetB0", "ConvNeXtTiny")
]


@pytest.mark.only("tensorflow", "jax")
@pytest.mark.parametrize("name", ["MobileNetV2", *ON_TENSORFLOW])
# Keras says it of the optimizer that the second policy does not train.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_an_application_is_converted_to_both_policies(tmp_path, capsys, name):
    if BACKEND == "tensorflow":
        train_application.main(name, tmp_path)
        said = capsys.readouterr().out
    else:
        environ = environment(KERAS_BACKEND=BACKEND, XLA_FLAGS=QUICK_COMPILER)
        run_all([[PROGRAM, name, tmp_path]], [environ], tmp_path, timeout=600)
        said = (tmp_path / "process_0.log").read_text()
    assert said.count(f"{name} mixed_") == 2

"""BayesFlow: the parameters of a simulator from what it showed, with networks of its own."""

import bayesflow as bf
import keras
import numpy as np
from program import BATCH, Program, random

PARAMETERS, SEEN = 2, 3


@keras.saving.register_keras_serializable(package="programs")
class Posterior(bf.ContinuousApproximator):
    """BayesFlow's `train_step` and loss; its `fit` takes a data set of its own."""

    def fit(self, x, y=None, batch_size=BATCH, shuffle=False, **arguments):
        dataset = bf.OfflineDataset(x, batch_size, adapter=None, shuffle=shuffle)
        return super().fit(dataset=dataset, **arguments)


def coupling_flow_model():
    """Two steps of a flow, built for the simulator's shapes."""
    subnet = {"widths": (16, 16), "dropout": None}
    model = Posterior(inference_network=bf.networks.CouplingFlow(depth=2, subnet_kwargs=subnet))
    model.build({name: array.shape for name, array in simulated()[0].items()})
    return model


def simulated():
    """Parameters, and what the simulator shows under them; there are no targets."""
    parameters = random().normal(size=(BATCH, PARAMETERS)).astype("float32")
    seen = np.tanh(parameters @ random().normal(size=(PARAMETERS, SEEN))).astype("float32")
    return {"inference_variables": parameters, "inference_conditions": seen}, None


def density_of(model):
    """What `kmp.debug` asks for in a model without a `call`: its flow, with a loss of its own."""
    inputs = keras.Input((PARAMETERS,)), keras.Input((SEEN,))
    _, density = model.inference_network(inputs[0], conditions=inputs[1], density=True)
    part = keras.Model(inputs, density)
    part.compile(model.optimizer, lambda _, log_density: -keras.ops.mean(log_density))
    x = simulated()[0]
    return part, (x["inference_variables"], x["inference_conditions"]), np.zeros(BATCH, "float32")


coupling_flow = Program(coupling_flow_model, simulated, callable=False, part=density_of)

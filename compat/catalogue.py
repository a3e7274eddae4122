"""The programs of the table by their names; nothing is imported before it is asked for."""

import dataclasses
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from program import Program


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a program is: its source, the file here that has it, and what it is in words."""

    source: str
    module: str
    what: str


_LANGUAGE = {
    "gpt2": "GPT-2, next word",
    "llama": "Llama, next word",
    "gemma": "Gemma 2, next word",
    "mistral": "Mistral with a sliding window, next word",
    "mixtral": "Mixtral, mixture of experts, next word",
    "qwen3": "Qwen 3, next word",
    "opt": "OPT, next word",
    "bloom": "BLOOM, next word",
    "bert": "BERT, text classifier",
    "distil_bert": "DistilBERT, text classifier",
    "deberta": "DeBERTa v3, text classifier",
    "albert": "ALBERT, text classifier",
    "f_net": "FNet, text classifier",
    "roberta": "RoBERTa, masked words",
    "t5": "T5, encoder and decoder",
    "bart": "BART, encoder and decoder",
}

_VISION = {
    "vit": "ViT, image classifier",
    "swin": "Swin Transformer, image classifier",
    "resnet": "ResNet, image classifier",
    "efficientnet": "EfficientNet, image classifier",
    "densenet": "DenseNet, image classifier",
    "vgg": "VGG, image classifier",
    "xception": "Xception, image classifier",
    "deeplab": "DeepLab v3+, segmentation",
    "segformer": "SegFormer, segmentation",
}

_SEVERAL = {
    "whisper": "Whisper, speech to text",
    "moonshine": "Moonshine, speech to text",
    "sd_vae": "Stable Diffusion 3's autoencoder",
    "stable_diffusion": "Stable Diffusion 3",
    "clip": "CLIP, images and words",
}

_RECOMMENDING = {
    "dlrm": "DLRM, clicks",
    "deep_cross": "Deep and cross network, clicks",
    "two_towers": "Two towers, retrieval",
    "ranking": "List-wise ranking",
}

_BAYES = {"coupling_flow": "Coupling flow, parameters of a simulator"}

_GENERATIVE = {
    "vae": "Variational autoencoder",
    "gan": "GAN with two optimizers",
    "unet": "U-Net, segmentation",
    "distillation": "Distillation",
    "diffusion": "Denoising diffusion",
}

_SEQUENCES = {
    "seq2seq": "Sequence to sequence with LSTMs",
    "translation": "Transformer, translation",
    "ctc": "Speech with the CTC loss",
    "graph_attention": "Graph attention",
    "deep_q": "Deep Q-learning",
}

CATALOGUE: dict[str, Entry] = {
    **{name: Entry("keras-hub", "language", what) for name, what in _LANGUAGE.items()},
    **{name: Entry("keras-hub", "vision", what) for name, what in _VISION.items()},
    **{name: Entry("keras-hub", "several", what) for name, what in _SEVERAL.items()},
    **{name: Entry("keras-rs", "recommending", what) for name, what in _RECOMMENDING.items()},
    **{name: Entry("BayesFlow", "bayes", what) for name, what in _BAYES.items()},
    **{name: Entry("as on keras.io", "generative", what) for name, what in _GENERATIVE.items()},
    **{name: Entry("as on keras.io", "sequences", what) for name, what in _SEQUENCES.items()},
}


def program(name: str) -> "Program":
    """Import a program's module, and return the program."""
    found = getattr(importlib.import_module(CATALOGUE[name].module), name)
    return dataclasses.replace(found, name=name)

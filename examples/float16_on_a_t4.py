"""A model that was born in bfloat16 gives blank text in float16: find the layers, and cure it.

    python examples/float16_on_a_t4.py                      a tiny one, here
    python examples/float16_on_a_t4.py --preset gemma_2b_en --prompt "Keras is"
    python examples/float16_on_a_t4.py --preset gemma_2b_en --plan t4

T4 and V100 cards are fast in float16 only. Models that were trained in bfloat16 may make numbers
beyond 65504 inside; these become inf, then NaN, and of NaN the likeliest token is number 0, which
is padding: the text is blank. `kmp.debug.diagnose` runs the model in float32, ranks its layers by
what float16 does to the output, and returns the map of the few that have to stay in float32. It is
tried before it is returned.

Without a preset the model is the tiny one of finetune_language_model.py, in whose last block one
product is made 262,144 times as large, and divided again by the next layer: in float32 and bfloat16
that changes no answer. --plan asks XLA for the bytes of one forward pass on a T4, without a T4.
Needs `pip install keras-hub`.
"""

import argparse
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import finetune_language_model as finetune
import keras
import keras_hub
import memory_plan
import numpy as np

import kmp

FACTOR = 2.0**18  # exact in every format


def make_tiny(length: int, epochs: int) -> keras.Model:
    """The tiny model in float32, with a product that is beyond float16 in its last block."""
    weights = finetune.teach_tiny(length, epochs)
    model = keras_hub.models.GemmaCausalLM(finetune.build_backbone("tiny", "float32"))
    model.set_weights(weights)
    block = model.backbone.transformer_layers[-1]
    block.gating_ffw_2.kernel.assign(block.gating_ffw_2.kernel * FACTOR)
    block.ffw_linear.kernel.assign(block.ffw_linear.kernel / FACTOR)
    return model


def tokens_of(model: keras.Model, text: str, length: int) -> dict[str, np.ndarray]:
    """The text as the model takes it in `generate`: int32[1, length], padded."""
    if model.preprocessor is not None:
        found = model.preprocessor.generate_preprocess([text], sequence_length=length)
        return keras.tree.map_structure(np.asarray, found)
    codes = np.frombuffer(text.encode(), "uint8")[: length // 2]
    tokens, mask = np.zeros((2, 1, length), "int32")
    tokens[0, : len(codes)], mask[0, : len(codes)] = codes, 1
    return {"token_ids": tokens, "padding_mask": mask}


def answer(model: keras.Model, prompt: dict[str, np.ndarray]) -> list[int]:
    """The tokens that the model adds, the likeliest each."""
    preprocessor, model.preprocessor = model.preprocessor, None  # tokens in, tokens out
    model.compile(sampler="greedy")
    found = model.generate(prompt, stop_token_ids=None)
    model.preprocessor = preprocessor
    return np.asarray(found["token_ids"])[0][int(prompt["padding_mask"].sum()) :].tolist()


def words_of(model: keras.Model, tokens: list[int]) -> str:
    """Tokens as text."""
    if model.preprocessor is None:
        return bytes(tokens).decode(errors="replace")
    return model.preprocessor.tokenizer.detokenize(np.array(tokens, "int32"))


def load(arguments: argparse.Namespace) -> keras.Model:
    """The model in float32, in which it is right."""
    if arguments.preset is None:
        return make_tiny(arguments.length, 1 if arguments.smoke else 3)
    return keras_hub.models.CausalLM.from_preset(arguments.preset, dtype="float32")


def plan(arguments: argparse.Namespace) -> None:
    """Print XLA's plan of a forward pass in float32 and in float16."""
    batch = finetune.batch_of(1, arguments.length)
    for dtype in ("float32", "mixed_float16"):

        def build(dtype: str = dtype) -> keras.Model:
            backbone = finetune.build_backbone(arguments.preset or "tiny", dtype)
            states = backbone(backbone.input)
            return keras.Model(backbone.input, backbone.token_embedding(states, reverse=True))

        print(f"{dtype}: {memory_plan.plan_forward(build, batch[0], arguments.plan)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Answer in float32 and in float16, diagnose, and answer under the map."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", help="of keras-hub, or the folder of one; left out: a tiny one")
    parser.add_argument("--prompt", default="The value of the ")
    parser.add_argument("--length", type=int, default=64, help="tokens of prompt and answer")
    parser.add_argument("--plan", choices=memory_plan.DEVICES, help="bytes on this card, no more")
    parser.add_argument("--smoke", action="store_true", help="a tiny model that has read less")
    arguments = parser.parse_args(argv)
    if arguments.plan:
        sys.exit(plan(arguments) if memory_plan.is_ready() else memory_plan.again())
    keras.utils.set_random_seed(0)
    model = load(arguments)
    prompt = tokens_of(model, arguments.prompt, arguments.length)
    right = answer(model, prompt)
    print(f"float32: {words_of(model, right)!r}")
    diagnosis = kmp.debug.diagnose(model, prompt, policy="mixed_float16")  # while it is in float32

    kmp.to_mixed_precision(model, "mixed_float16")
    blank = answer(model, prompt)
    print(f"mixed_float16: {len(blank)} tokens, of which {blank.count(0)} are padding")

    print(f"\n{str(diagnosis).splitlines()[0]}")
    kmp.to_mixed_precision(model, diagnosis.policy)
    cured = answer(model, prompt)
    print(f"Under the map: {words_of(model, cured)!r}")
    same = sum(a == b for a, b in zip(right, cured, strict=True))
    print(f"{same} of {len(right)} tokens are those of float32, on {keras.backend.backend()}")


if __name__ == "__main__":
    main()

"""Fine-tune a language model of keras-hub on one card: LoRA on 24 GB, all of it on 80 GB.

    python examples/finetune_language_model.py                     a tiny one, here, in a minute
    python examples/finetune_language_model.py --preset gemma_2b_en --text mine.txt
    python examples/finetune_language_model.py --preset gemma_7b_en --text mine.txt --method full
    python examples/finetune_language_model.py --preset gemma_7b_en --method full --plan h100

Four ways, by what a parameter costs before anything is computed:

    lora     2 bytes: a frozen bfloat16 base; the adapters are trained as if in float32
    full     5.1 bytes: weights of 24 bits, AdamW's slots of 8 bits, all updated in float32
    half     6 bytes: weights and slots in bfloat16, which is faster, and noisier
    mixed    12 bytes: Keras's mixed_bfloat16, to compare

With --plan nothing is trained or downloaded: XLA says what the step will hold on that card, which
needs not be here (see memory_plan.py). Without a preset the model is tiny and made here: it learns
Python's help topics in float32 and is then fine-tuned on the source text of Python's library.
Needs `pip install keras-hub`; KERAS_BACKEND=jax, tensorflow or torch.
"""

import argparse
import functools
import os
import pathlib
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

from pydoc_data.topics import topics

import keras
import keras_hub
import memory_plan
import numpy as np

import kmp

GEMMA = dict(vocabulary_size=256_000, head_dim=256)
SIZES = {  # what the presets consist of, for plans without a download
    "gemma_2b_en": dict(
        **GEMMA,
        num_layers=18,
        num_query_heads=8,
        num_key_value_heads=1,
        hidden_dim=2048,
        intermediate_dim=32768,
    ),
    "gemma_7b_en": dict(
        **GEMMA,
        num_layers=28,
        num_query_heads=16,
        num_key_value_heads=16,
        hidden_dim=3072,
        intermediate_dim=49152,
    ),
    "tiny": dict(
        vocabulary_size=256,  # bytes
        head_dim=8,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=8,
        hidden_dim=64,
        intermediate_dim=256,
    ),
}
DTYPES = {"lora": "bfloat16", "full": "bfloat16", "half": "bfloat16", "mixed": "mixed_bfloat16"}
SETTINGS = {
    # A bfloat16 weight and its int16 remainder are a float32 number.
    "lora": dict(master_weights=True, slot_dtype="float32"),
    "full": dict(master_weights=24, slot_dtype="int8"),
    "half": {},
    "mixed": {},
}


def build_backbone(size: str, dtype: str) -> keras.Model:
    """All of a language model but the logits, with random weights."""
    return keras_hub.models.GemmaBackbone(**SIZES[size], dtype=dtype)


def prepare(backbone: keras.Model, method: str, rank: int) -> None:
    """Freeze all but adapters for LoRA, and keep no more of each block than its input."""
    if method == "lora":
        backbone.enable_lora(rank)
    kmp.recompute(backbone, lambda layer, path: layer in backbone.transformer_layers)


def compile_model(model: keras.Model, method: str, rate: float, metrics: Sequence = ()) -> None:
    """With AdamW. bfloat16 needs no loss scale; steps that are not finite are skipped."""
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01)
    model.compile(
        kmp.scaled(optimizer, loss_scale="none", **SETTINGS[method]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=list(metrics),
    )


def batch_of(size: int, length: int) -> tuple:
    """Shapes of a batch, as keras-hub's preprocessor makes it."""
    tokens = np.zeros((size, length), "int32")
    return {"token_ids": tokens, "padding_mask": tokens}, tokens, tokens.astype("float32")


def plan(arguments: argparse.Namespace, **sharding) -> memory_plan.Plan:
    """XLA's plan of the step on a card."""
    size, method = arguments.preset or "tiny", arguments.method

    def build() -> keras.Model:
        backbone = build_backbone(size, DTYPES[method])
        prepare(backbone, method, arguments.rank)
        # CausalLM makes an optimizer, which has values; its outputs are these.
        states = backbone(backbone.input)
        return keras.Model(backbone.input, backbone.token_embedding(states, reverse=True))

    compile_it = functools.partial(compile_model, method=method, rate=arguments.rate)
    batch = batch_of(arguments.batch, arguments.length)
    return memory_plan.plan(build, compile_it, batch, arguments.plan, **sharding)


def windows(text: str, length: int) -> tuple:
    """The text in pieces of `length` bytes, and for each byte the next one."""
    codes = np.frombuffer(text.encode(), "uint8").astype("int32")
    codes = codes[: (len(codes) - 1) // length * length + 1]
    x, y = (part.reshape(-1, length) for part in (codes[:-1], codes[1:]))
    return {"token_ids": x, "padding_mask": np.ones_like(x)}, y, np.ones(y.shape, "float32")


def shuffled(data: tuple) -> tuple:
    """The same sequences in another order, as arrays."""
    order = np.random.default_rng(0).permutation(len(data[1]))
    return keras.tree.map_structure(lambda x: np.asarray(x)[order], data)


def teach_tiny(length: int, epochs: int) -> list[np.ndarray]:
    """Weights of the tiny model that has read Python's help topics, in float32."""
    model = keras_hub.models.GemmaCausalLM(build_backbone("tiny", "float32"))
    model.compile(
        keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    text = "".join(topics[name] for name in sorted(topics))[:200_000]
    x, y, _ = windows(text, length)
    model.fit(x, y, batch_size=32, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def load(arguments: argparse.Namespace, text: str) -> tuple[keras.Model, tuple]:
    """The model in the dtype of the method, and the text as it takes it."""
    dtype, length = DTYPES[arguments.method], arguments.length
    if arguments.preset is None:
        weights = teach_tiny(length, 1 if arguments.smoke else 3)
        model = keras_hub.models.GemmaCausalLM(build_backbone("tiny", dtype))
        model.set_weights(weights)  # rounded to nearest, once
        return model, shuffled(windows(text, length))
    model = keras_hub.models.CausalLM.from_preset(arguments.preset, dtype=dtype)
    model.preprocessor.sequence_length = length
    # Some 4 characters a token; what is cut off is not read.
    pieces = [text[i : i + 4 * length] for i in range(0, len(text), 4 * length)]
    return model, shuffled(model.preprocessor(pieces))


def make_parser(description: str) -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--preset", help="of keras-hub, or the folder of one; left out: a tiny one")
    parser.add_argument("--method", choices=DTYPES, default="lora")
    parser.add_argument("--text", type=pathlib.Path, help="what to learn; left out: Python's own")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--rate", type=float, help="learning rate")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--save", type=pathlib.Path, help="a folder for what was learned")
    parser.add_argument("--plan", choices=memory_plan.DEVICES, help="bytes on this card, no more")
    parser.add_argument("--smoke", action="store_true", help="less text")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for, with a length and a learning rate for the size of the model."""
    arguments = parser.parse_args(argv)
    tiny = arguments.preset is None
    arguments.length = arguments.length or (64 if tiny else 512)
    if arguments.rate is None:
        rate, faster = (1e-3, 2) if tiny else (1e-5, 10)
        arguments.rate = faster * rate if arguments.method == "lora" else rate
    return arguments


def save(model: keras.Model, method: str, folder: pathlib.Path) -> None:
    """The adapters alone, or a preset for `from_preset`."""
    folder.mkdir(parents=True, exist_ok=True)
    if method == "lora":
        model.backbone.save_lora_weights(str(folder / "adapters.lora.h5"))
    else:
        model.save_to_preset(str(folder))


def train(arguments: argparse.Namespace) -> keras.Model:
    """Load, train, and say what came of it."""
    keras.utils.set_random_seed(0)
    text = (arguments.text or pathlib.Path(argparse.__file__)).read_text()
    model, (x, y, weights) = load(arguments, text[: 40_000 if arguments.smoke else None])
    preprocessor, model.preprocessor = model.preprocessor, None  # `load` has made tokens
    prepare(model.backbone, arguments.method, arguments.rank)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    compile_model(model, arguments.method, arguments.rate, [accuracy])
    sizes = dict(batch_size=arguments.batch, sample_weight=weights)
    before = model.evaluate(x, y, **sizes, verbose=0)
    health = kmp.callbacks.GradientHealth()
    model.fit(  # keras-hub makes a tf.data.Dataset, which Keras does not shuffle: `load` has
        *(x, y),
        **sizes,
        epochs=arguments.epochs,
        shuffle=False,
        callbacks=[health],
        verbose=0 if arguments.preset is None else 1,
    )
    after = model.evaluate(x, y, **sizes, verbose=0)
    held, parameters = memory_plan.held_bytes(model), model.count_params()
    print(health.verdict)
    print(
        f"{arguments.method}: {memory_plan.numbers(model):,} of {parameters:,} parameters trained"
    )
    print(f"Weights and slots: {held:,} bytes, {held / parameters:.2f} a parameter")
    print(f"Loss {before[0]:.3f} before, {after[0]:.3f} after, on {keras.backend.backend()}")
    model.preprocessor = preprocessor
    if arguments.save:
        save(model, arguments.method, arguments.save)
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Plan, or train."""
    arguments = parse(make_parser(__doc__.splitlines()[0]), argv)
    if not arguments.plan:
        train(arguments)
    elif memory_plan.is_ready():
        print(f"{arguments.method}: {plan(arguments)}")
    else:
        sys.exit(memory_plan.again())


if __name__ == "__main__":
    main()

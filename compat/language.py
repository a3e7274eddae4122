"""Language models of keras-hub, two layers of width 16 to 32 each."""

from collections.abc import Callable

import keras
import keras_hub.models as hub
from program import LENGTH, WORDS, Program, classes, crossentropy, padding, words

WIDTH = dict(vocabulary_size=WORDS, num_layers=2, hidden_dim=16, intermediate_dim=32)
ENCODER = dict(**WIDTH, num_heads=2, max_sequence_length=LENGTH)
DECODER = dict(**WIDTH, num_query_heads=4, num_key_value_heads=2)


def sentences() -> dict:
    """What most language models take."""
    return {"token_ids": words(), "padding_mask": padding()}


def segmented() -> dict:
    """The same with the number of the sentence."""
    return {**sentences(), "segment_ids": classes(2, LENGTH)}


def pairs() -> dict:
    """What an encoder with a decoder takes."""
    return {
        "encoder_token_ids": words(LENGTH + 2),
        "encoder_padding_mask": padding(LENGTH + 2),
        "decoder_token_ids": words(),
        "decoder_padding_mask": padding(),
    }


def causal(make: Callable[[], keras.Model]) -> Program:
    """Predict the next word."""
    return Program(make, lambda: (sentences(), classes(WORDS, LENGTH)), crossentropy)


def classifier(make: Callable[[], keras.Model], inputs: Callable[[], dict] = sentences) -> Program:
    """Sort sentences into three classes."""
    return Program(make, lambda: (inputs(), classes(3)), crossentropy)


def translator(backbone: Callable[[], keras.Model]) -> Program:
    """Predict the next word of another sentence; keras-hub has the backbone alone."""

    def make():
        body = backbone()
        states = body.output["decoder_sequence_output"]
        logits = body.token_embedding(states, reverse=True)
        return keras.Model(body.input, logits)

    return Program(make, lambda: (pairs(), classes(WORDS, LENGTH)), crossentropy)


gpt2 = causal(lambda: hub.GPT2CausalLM(hub.GPT2Backbone(**ENCODER)))
llama = causal(lambda: hub.LlamaCausalLM(hub.LlamaBackbone(**DECODER)))
gemma = causal(
    lambda: hub.GemmaCausalLM(
        hub.GemmaBackbone(**DECODER, head_dim=4, use_post_ffw_norm=True, final_logit_soft_cap=30)
    )
)
mistral = causal(lambda: hub.MistralCausalLM(hub.MistralBackbone(**DECODER, sliding_window=4)))
mixtral = causal(
    lambda: hub.MixtralCausalLM(hub.MixtralBackbone(**DECODER, num_experts=4, sliding_window=4))
)
qwen3 = causal(lambda: hub.Qwen3CausalLM(hub.Qwen3Backbone(**DECODER, head_dim=8)))
opt = causal(lambda: hub.OPTCausalLM(hub.OPTBackbone(**ENCODER)))
bloom = causal(lambda: hub.BloomCausalLM(hub.BloomBackbone(**WIDTH, num_heads=2)))

bert = classifier(
    lambda: hub.BertTextClassifier(hub.BertBackbone(**ENCODER), num_classes=3), segmented
)
distil_bert = classifier(
    lambda: hub.DistilBertTextClassifier(hub.DistilBertBackbone(**ENCODER), num_classes=3)
)
deberta = classifier(
    lambda: hub.DebertaV3TextClassifier(
        hub.DebertaV3Backbone(**ENCODER, bucket_size=4), num_classes=3
    )
)
albert = classifier(
    lambda: hub.AlbertTextClassifier(hub.AlbertBackbone(**ENCODER, embedding_dim=8), num_classes=3),
    segmented,
)
f_net = classifier(
    lambda: hub.FNetTextClassifier(
        hub.FNetBackbone(**WIDTH, max_sequence_length=LENGTH), num_classes=3
    ),
    lambda: {"token_ids": words(), "segment_ids": classes(2, LENGTH)},
)
t5 = translator(lambda: hub.T5Backbone(**WIDTH, num_heads=2))
bart = translator(lambda: hub.BartBackbone(**{**ENCODER, "max_sequence_length": LENGTH + 2}))


def masked_batch() -> tuple[dict, object]:
    """Guess the words at three places."""
    return {**sentences(), "mask_positions": classes(LENGTH - 2, 3)}, classes(WORDS, 3)


roberta = Program(
    lambda: hub.RobertaMaskedLM(hub.RobertaBackbone(**ENCODER)), masked_batch, crossentropy
)

"""Audio, diffusion, and images with words: models of keras-hub of more than one part."""

import keras
import keras_hub.models as hub
import numpy as np
from keras_hub.src.models.vae.vae_backbone import VAEBackbone  # a part, and not exported
from program import (
    BATCH,
    IMAGE,
    LENGTH,
    WORDS,
    Program,
    classes,
    crossentropy,
    images,
    padding,
    words,
)

PARTS = dict(hidden_dim=16, num_layers=2, num_heads=2, intermediate_dim=32)
TEXT = dict(**PARTS, vocabulary_size=WORDS, embedding_dim=16, max_sequence_length=LENGTH)


def whisper_model():
    """keras-hub has the backbone alone: the next word is read off the shared embedding."""
    body = hub.WhisperBackbone(
        **PARTS,
        vocabulary_size=WORDS,
        num_mels=8,
        max_encoder_sequence_length=2 * LENGTH,
        max_decoder_sequence_length=LENGTH,
    )
    states = body.output["decoder_sequence_output"]
    logits = body.token_embedding(states, reverse=True)
    return keras.Model(body.input, logits)


def spectrograms():
    """Audio and words."""
    x = {
        "encoder_features": images((2 * LENGTH, 8)),
        "decoder_token_ids": words(),
        "decoder_padding_mask": padding(),
    }
    return x, classes(WORDS, LENGTH)


def moonshine_model():
    """The same for Moonshine, which hears the samples themselves."""
    body = hub.MoonshineBackbone(
        vocabulary_size=WORDS,
        filter_dim=16,
        encoder_num_layers=1,
        decoder_num_layers=1,
        hidden_dim=16,
        intermediate_dim=32,
        encoder_num_heads=2,
        decoder_num_heads=2,
    )
    states = body.output["decoder_sequence_output"]
    return keras.Model(body.input, keras.layers.Dense(WORDS, name="head")(states))


def samples():
    """Audio of 2,048 samples, and words."""
    x = {
        "encoder_input_values": images((2048, 1)),
        "encoder_padding_mask": np.ones((BATCH, 2048), "bool"),
        "decoder_token_ids": words(),
        "decoder_padding_mask": padding().astype("bool"),
    }
    return x, classes(WORDS, LENGTH)


def vae_model():
    """The autoencoder of Stable Diffusion 3, one block a stage."""
    return VAEBackbone(
        encoder_num_filters=[32, 32],
        encoder_num_blocks=[1, 1],
        decoder_num_filters=[32, 32],
        decoder_num_blocks=[1, 1],
        sample_channels=8,
        sampler_method="mode",
    )


def diffusion_model():
    """Stable Diffusion 3: text encoders, diffusion transformer, autoencoder; trained as a whole."""
    stages = dict(num_filters=[32, 32, 32, 32], num_blocks=[1, 1, 1, 1])
    vae = VAEBackbone(
        **{f"{part}_{k}": v for part in ("encoder", "decoder") for k, v in stages.items()},
        sample_channels=8,
    )
    body = hub.StableDiffusion3Backbone(
        mmdit_patch_size=2,
        mmdit_hidden_dim=16,
        mmdit_num_layers=2,
        mmdit_num_heads=2,
        mmdit_position_size=4,
        mmdit_qk_norm=None,
        mmdit_dual_attention_indices=None,
        vae=vae,
        clip_l=hub.CLIPTextEncoder(**TEXT, intermediate_output_index=-2, name="clip_l"),
        clip_g=hub.CLIPTextEncoder(**TEXT, intermediate_output_index=-2, name="clip_g"),
        latent_channels=4,
        image_shape=IMAGE,
    )
    return keras.Model(body.input, body.output["images"])


def prompts():
    """Images, noise and words."""
    names = ("clip_l_token_ids", "clip_l_negative_token_ids")
    names += ("clip_g_token_ids", "clip_g_negative_token_ids")
    x = {
        "images": images(),
        "latents": images((4, 4, 4)),
        **{name: words() for name in names},
        "num_steps": np.full(BATCH, 4, "int32"),
        "guidance_scale": np.full(BATCH, 2.0, "float32"),
    }
    return x, images()


def clip_model():
    """CLIP; the loss pulls images and their words together."""
    vision = hub.CLIPVisionEncoder(**PARTS, patch_size=8, image_shape=IMAGE)
    body = hub.CLIPBackbone(vision, hub.CLIPTextEncoder(**TEXT), projection_dim=8)
    return keras.Model(body.input, body.output["vision_logits"])


def captions():
    """Images and words; each image belongs to the words in the same place."""
    return {"images": images(), "token_ids": words()}, np.arange(BATCH, dtype="int32")


whisper = Program(whisper_model, spectrograms, crossentropy)
moonshine = Program(moonshine_model, samples, crossentropy)
sd_vae = Program(vae_model, lambda: (images(), images()), "mse")
stable_diffusion = Program(diffusion_model, prompts, "mse")
clip = Program(clip_model, captions, crossentropy)

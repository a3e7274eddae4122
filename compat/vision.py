"""Image models of keras-hub, with the fewest blocks that they can have, on images of 32 x 32."""

from collections.abc import Callable

import keras
import keras_hub.models as hub
from program import IMAGE, Program, classes, crossentropy, images


def classifier(backbone: Callable[[], keras.Model], task=hub.ImageClassifier) -> Program:
    """Sort images into three classes."""

    def make():
        return task(backbone(), num_classes=3)

    return Program(make, lambda: (images(), classes(3)), crossentropy)


def token_classifier(backbone: keras.Model, num_classes: int) -> keras.Model:
    """A head on the mean of all tokens, for a backbone whose output is no image."""
    x = keras.layers.GlobalAveragePooling1D(name="pooler")(backbone.output)
    return keras.Model(backbone.input, keras.layers.Dense(num_classes, name="logits")(x))


def resnet_backbone():
    """Its first stage has to be 64 wide, and its stem then too."""
    return hub.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 16],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=IMAGE,
    )


def efficientnet_backbone():
    """One block of each kind."""
    return hub.EfficientNetBackbone(
        stackwise_kernel_sizes=[3, 3],
        stackwise_num_repeats=[1, 1],
        stackwise_input_filters=[8, 8],
        stackwise_output_filters=[8, 16],
        stackwise_expansion_ratios=[1, 4],
        stackwise_squeeze_and_excite_ratios=[0.0, 0.25],
        stackwise_strides=[1, 2],
        stackwise_block_types=["fused", "unfused"],
        width_coefficient=1.0,
        depth_coefficient=1.0,
        num_features=32,
        input_shape=IMAGE,
    )


def densenet_backbone():
    """Two blocks of two layers."""
    return hub.DenseNetBackbone(stackwise_num_repeats=[2, 2], growth_rate=8, image_shape=IMAGE)


def vgg_backbone():
    """Two blocks of one layer."""
    return hub.VGGBackbone(
        stackwise_num_repeats=[1, 1], stackwise_num_filters=[8, 16], image_shape=IMAGE
    )


def xception_backbone():
    """Separable convolutions."""
    return hub.XceptionBackbone(
        stackwise_conv_filters=[[8, 16], [16, 16]],
        stackwise_pooling=[True, False],
        image_shape=IMAGE,
    )


def mit_backbone():
    """The encoder of SegFormer: two stages of one block."""
    return hub.MiTBackbone(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.1,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        hidden_dims=[8, 16],
        image_shape=IMAGE,
    )


def deeplab_segmenter():
    """DeepLab v3+ on the ResNet of above."""
    backbone = hub.DeepLabV3Backbone(
        image_encoder=resnet_backbone(),
        spatial_pyramid_pooling_key="P3",
        low_level_feature_key="P2",
        upsampling_size=2,
        dilation_rates=[2, 3],
        projection_filters=8,
        image_shape=IMAGE,
    )
    return hub.DeepLabV3ImageSegmenter(backbone, num_classes=3)


def segformer_segmenter():
    """SegFormer."""
    backbone = hub.SegFormerBackbone(image_encoder=mit_backbone(), projection_filters=16)
    return hub.SegFormerImageSegmenter(backbone, num_classes=3)


def segmenter(make: Callable[[], keras.Model]) -> Program:
    """Sort each pixel into three classes."""
    return Program(make, lambda: (images(), classes(3, 32, 32)), compile=compile_segmenter)


def compile_segmenter(model, wrap, **arguments):
    """Without keras-hub's own metric, which wants labels of another shape."""
    optimizer = wrap(keras.optimizers.Adam(1e-3))
    model.compile(optimizer, loss=crossentropy(), metrics=[], **arguments)


vit = classifier(
    lambda: hub.ViTBackbone(
        image_shape=IMAGE, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    ),
    hub.ViTImageClassifier,
)
swin = classifier(
    lambda: hub.SwinTransformerBackbone(
        image_shape=IMAGE, embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4
    ),
    token_classifier,
)
resnet = classifier(resnet_backbone)
efficientnet = classifier(efficientnet_backbone)
densenet = classifier(densenet_backbone)
vgg = classifier(vgg_backbone)
xception = classifier(xception_backbone)
deeplab = segmenter(deeplab_segmenter)
segformer = segmenter(segformer_segmenter)

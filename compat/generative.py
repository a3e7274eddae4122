"""Programs of keras.io's kinds that make something: VAE, GAN, U-Net, distillation, diffusion."""

import keras
import numpy as np
from keras import layers, ops
from program import BATCH, Program, classes, crossentropy, images, random

SMALL, CODE = (16, 16, 1), 4


@keras.saving.register_keras_serializable(package="programs")
class Sampling(layers.Layer):
    """A code near its mean."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator(1)

    def call(self, mean, log_variance):
        noise = keras.random.normal(ops.shape(mean), seed=self.generator, dtype="float32")
        return mean + ops.exp(0.5 * log_variance) * ops.cast(noise, mean.dtype)


@keras.saving.register_keras_serializable(package="programs")
class VAE(keras.Model):
    """An autoencoder whose loss is all in `compute_loss`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        image, code = keras.Input(SMALL), keras.Input((CODE,))
        x = layers.Conv2D(8, 3, 2, "same", activation="relu", name="down")(image)
        x = layers.Dense(16, "relu", name="hidden")(layers.Flatten()(x))
        mean, spread = layers.Dense(CODE, name="mean")(x), layers.Dense(CODE, name="spread")(x)
        self.encoder = keras.Model(image, [mean, spread, Sampling()(mean, spread)], name="encoder")
        x = layers.Dense(8 * 8 * 8, "relu", name="grow")(code)
        x = layers.Reshape((8, 8, 8))(x)
        x = layers.Conv2DTranspose(8, 3, 2, "same", activation="relu", name="up")(x)
        x = layers.Conv2D(1, 3, padding="same", name="paint")(x)
        self.decoder = keras.Model(code, x, name="decoder")
        self.built = True

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mean, spread, code = (ops.cast(t, "float32") for t in self.encoder(x, training=training))
        image = ops.cast(self.decoder(code, training=training), "float32")
        far = ops.mean(-0.5 * (1 + spread - ops.square(mean) - ops.exp(spread)))
        return ops.mean(ops.square(image - x)) + far

    def call(self, x, training=None):
        return self.decoder(self.encoder(x, training=training)[2], training=training)


@keras.saving.register_keras_serializable(package="programs")
class GAN(keras.Model):
    """Two nets, two optimizers, a `train_step` of its own and no `call`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        stack = [keras.Input(SMALL), layers.Conv2D(8, 3, 2, "same", name="look")]
        stack += [layers.LeakyReLU(negative_slope=0.2), layers.GlobalMaxPooling2D()]
        self.critic = keras.Sequential([*stack, layers.Dense(1, name="real")], name="critic")
        stack = [keras.Input((CODE,)), layers.Dense(8 * 8 * 8, "relu", name="grow")]
        stack += [layers.Reshape((8, 8, 8)), layers.UpSampling2D()]
        self.artist = keras.Sequential(
            [*stack, layers.Conv2D(1, 3, padding="same", name="paint")], name="artist"
        )
        self.generator = keras.random.SeedGenerator(2)
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        self.built = True

    def compile(self, critic_optimizer, artist_optimizer, **arguments):
        super().compile(**arguments)
        self.critic_optimizer, self.artist_optimizer = critic_optimizer, artist_optimizer

    def get_compile_config(self):
        return {
            "critic_optimizer": keras.saving.serialize_keras_object(self.critic_optimizer),
            "artist_optimizer": keras.saving.serialize_keras_object(self.artist_optimizer),
        }

    def compile_from_config(self, config):
        self.compile(**{k: keras.saving.deserialize_keras_object(v) for k, v in config.items()})
        self.critic_optimizer.build(self.critic.trainable_variables)
        self.artist_optimizer.build(self.artist.trainable_variables)

    def critic_loss(self, x, codes):
        both = ops.concatenate([x, ops.cast(self.artist(codes, training=True), x.dtype)])
        labels = ops.concatenate([ops.ones((BATCH, 1)), ops.zeros((BATCH, 1))])
        return self._loss_of(labels, both)

    def artist_loss(self, codes):
        return self._loss_of(ops.ones((BATCH, 1)), self.artist(codes, training=True))

    def _loss_of(self, labels, x):
        logits = ops.cast(self.critic(x, training=True), "float32")
        return self.entropy(labels, logits)

    def train_step(self, x):
        import tensorflow as tf

        codes = keras.random.normal((BATCH, CODE), seed=self.generator)
        with tf.GradientTape() as tape:
            critic_loss = self.critic_loss(x, codes)
            scaled = self.critic_optimizer.scale_loss(critic_loss)
        variables = self.critic.trainable_variables
        self.critic_optimizer.apply(tape.gradient(scaled, variables), variables)
        with tf.GradientTape() as tape:
            artist_loss = self.artist_loss(codes)
            scaled = self.artist_optimizer.scale_loss(artist_loss)
        variables = self.artist.trainable_variables
        self.artist_optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"critic": critic_loss, "artist": artist_loss}


def compile_gan(model, wrap, **arguments):
    """An optimizer for each net."""
    critic, artist = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)
    model.compile(wrap(critic), wrap(artist), **arguments)


def critic_of(gan):
    """What `kmp.debug` asks for in a model without a `call`: one part, with a loss of its own."""
    gan.critic.compile(gan.critic_optimizer, gan.entropy)
    return gan.critic, images(SMALL), np.ones((BATCH, 1), "float32")


def unet_model():
    """Down twice and up twice, with the way across and batch normalization."""
    x = inputs = keras.Input((16, 16, 3))
    across = []
    for i, width in enumerate((8, 16)):
        x = layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"down{i}")(x)
        x = layers.ReLU()(layers.BatchNormalization(name=f"norm{i}")(x))
        across.append(x)
        x = layers.MaxPooling2D()(x)
    for i, width in enumerate((16, 8)):
        x = layers.Conv2DTranspose(width, 3, 2, "same", activation="relu", name=f"up{i}")(x)
        x = layers.Concatenate()([x, across.pop()])
    return keras.Model(inputs, layers.Conv2D(3, 1, name="pixels")(x))


@keras.saving.register_keras_serializable(package="programs")
class Distiller(keras.Model):
    """A small net learns from a large one that is frozen; the loss is both their answers."""

    def __init__(self, student, teacher, **kwargs):
        super().__init__(**kwargs)
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False
        self.distance = keras.losses.KLDivergence()

    def call(self, x, training=None):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        own = super().compute_loss(x, y, y_pred, sample_weight, training)
        soft = [ops.softmax(ops.cast(t, "float32") / 3) for t in (self.teacher(x), y_pred)]
        return 0.5 * own + 0.5 * self.distance(*soft)

    def get_config(self):
        nets = {"student": self.student, "teacher": self.teacher}
        packed = {k: keras.saving.serialize_keras_object(v) for k, v in nets.items()}
        return {**super().get_config(), **packed}

    @classmethod
    def from_config(cls, config):
        for name in ("student", "teacher"):
            config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**config)


def distiller_model():
    """Two convolutional nets."""

    def net(width, name):
        stack = [keras.Input(SMALL), layers.Conv2D(width, 3, 2, activation="relu", name="conv")]
        stack += [layers.GlobalAveragePooling2D(), layers.Dense(3, name="logits")]
        return keras.Sequential(stack, name=name)

    model = Distiller(net(4, "student"), net(16, "teacher"))
    model(images(SMALL))
    return model


def diffusion_model():
    """Guess the noise of an image from the image and how much there is."""
    image, time = keras.Input(SMALL, name="image"), keras.Input((1,), name="time")
    wave = layers.Dense(8, "swish", name="time_in")(time)
    x = layers.Conv2D(8, 3, padding="same", name="into")(image)
    for i in range(2):
        h = layers.GroupNormalization(4, name=f"norm{i}")(x)
        h = layers.Conv2D(8, 3, padding="same", activation="swish", name=f"conv{i}")(h)
        shift = layers.Reshape((1, 1, 8))(layers.Dense(8, name=f"shift{i}")(wave))
        x = layers.Add()([x, h, shift])
    noise = layers.Conv2D(1, 3, padding="same", name="noise")(x)
    return keras.Model({"image": image, "time": time}, noise)


def noisy():
    """Images, times and the noise that is in them."""
    x = {"image": images(SMALL), "time": random().random((BATCH, 1)).astype("float32")}
    return x, np.flip(images(SMALL), 0).copy()


vae = Program(VAE, lambda: (images(SMALL), None))
gan = Program(
    GAN,
    lambda: (images(SMALL), None),
    compile=compile_gan,
    backends=("tensorflow",),
    callable=False,
    part=critic_of,
    logged="critic",
    optimizer=lambda model: model.critic_optimizer,
    own_optimizers=True,
)
unet = Program(unet_model, lambda: (images((16, 16, 3)), classes(3, 16, 16)), crossentropy)
distillation = Program(distiller_model, lambda: (images(SMALL), classes(3)), crossentropy)
diffusion = Program(diffusion_model, noisy, "mse")

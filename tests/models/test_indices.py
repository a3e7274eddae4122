"""Indices that come as floats are the same before and after a conversion.

The oracle is the float32 model: it looks up the rows that it is given, which is tried first.
"""

import itertools

import carriers
import keras
import kinds
import numpy as np
import pytest
from carriers import CARRIERS, IDS, LOOKUPS, TABLES, called, functional, ids_of
from keras import layers, ops
from oracle import BACKEND

import kmp
from kmp._keras import layers_of

HALVES = ("mixed_float16", "mixed_bfloat16")

# Keras says so of a Flatten behind a Masking.
pytestmark = pytest.mark.filterwarnings("ignore:.*was passed an input with a mask:UserWarning")


def kept_for(report, reason):
    return {row.layer for row in report.rows if row.reason == reason}


def predicted(model, x=IDS):
    """The ids that arrive in the compiled program, and in an eager call."""
    return ids_of(model.predict(x, verbose=0)), ids_of(model(x))


def check(model, x=IDS, ids=IDS):
    for each in predicted(model, x):
        np.testing.assert_array_equal(each, ids)


def in_one_model(parts):
    """All parts beside each other: one conversion and one program for all of them."""
    inputs = keras.Input((8,))
    table, last = carriers.words(), carriers.head()
    outputs, found = {}, {}
    for name, part in parts.items():
        x, made = inputs, part()
        for layer in made:
            x = layer(x)
        outputs[name] = last(x if len(x.shape) == 3 else table(x))
        found[name] = [x for x in made if isinstance(x, keras.Layer)]
    return carriers.with_table(keras.Model(inputs, outputs)), found


def lost_ids(model):
    """The share of ids that arrive, of each part where not all do."""
    # JAX would compile each operation, TensorFlow and PyTorch run them at once.
    outputs = model.predict(IDS, verbose=0) if BACKEND == "jax" else model(IDS)
    shares = {name: float((ids_of(y) == IDS).mean()) for name, y in outputs.items()}
    return {name: share for name, share in shares.items() if share < 1}


@pytest.mark.parametrize("policy", HALVES)
def test_what_carries_ids_stays_in_float32(policy):
    model, found = in_one_model(CARRIERS)
    assert lost_ids(model) == {}
    report = kmp.to_mixed_precision(model, policy)
    assert lost_ids(model) == {}
    for name, made in found.items():
        leaves = [x for each in made for x in layers_of(each) if not isinstance(x, keras.Model)]
        leaves = [x for x in leaves if not isinstance(x, layers.InputLayer)]
        assert {x.compute_dtype for x in leaves} <= {"float32"}, name
        assert {report.kept[x.path or x.name] for x in leaves} <= {"carries indices"}, name
    half = kmp.Policy(policy).compute_dtype
    assert model.get_layer("words").compute_dtype == half


@pytest.mark.slow
@pytest.mark.parametrize("policy", HALVES)
def test_what_looks_up_computes_in_half_precision_on_ids_as_they_are(policy):
    model, found = in_one_model(
        {name: lambda make=make: [make()] for name, make in LOOKUPS.items()}
    )
    assert lost_ids(model) == {}
    report = kmp.to_mixed_precision(model, policy)
    assert lost_ids(model) == {}
    half = kmp.Policy(policy).compute_dtype
    dtypes = {name: layer.compute_dtype for name, (layer,) in found.items()}
    in_float32 = {name for name, dtype in dtypes.items() if dtype == "float32"}
    without_weights = {"constant table", "loop", "condition"}
    assert in_float32 == {"casts inside", *without_weights}
    assert set(dtypes.values()) == {half, "float32"}
    uncast = {row.layer for row in report.rows if row.after.endswith("i=uncast")}
    assert uncast == {"Own", "OneHot", "Positions", "OwnPositions", "Inside"}
    embeddings = [x for x in layers_of(model) if isinstance(x, layers.Embedding)]
    assert {x.compute_dtype for x in embeddings} == {half}


def test_integers_that_a_layer_casts_to_its_compute_dtype():
    for cast in (carriers.ToComputeDtype(), layers.Lambda(lambda ids: ids)):
        inputs = keras.Input((8,), dtype="int32")
        model = functional(layers.Reshape((8,)), cast, carriers.words(), inputs=inputs)
        report = kmp.to_mixed_precision(model, "mixed_bfloat16")
        check(model, IDS.astype("int32"))
        casts = isinstance(cast, carriers.ToComputeDtype)
        assert kept_for(report, "carries indices") == ({"ToComputeDtype"} if casts else set())


def test_integers_and_floats_together():
    """A sum of both is a float, in the precision of the layer."""
    some, others = keras.Input((4,), dtype="int32"), keras.Input((4,))
    joined = layers.Concatenate(name="joined")([some, others])
    model = keras.Model([some, others], carriers.head()(carriers.words()(joined)))
    carriers.with_table(model)
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert report.kept["joined"] == "carries indices"
    check(model, [IDS[:, :4].astype("int32"), IDS[:, 4:]])


# Other things that numbers must be exact for


LAYERS_OF_KERAS = {
    "Hashing": lambda: layers.Hashing(5000),
    "IntegerLookup": lambda: layers.IntegerLookup(vocabulary=list(range(2000, 2600))),
    "Discretization": lambda: layers.Discretization(list(np.arange(2000.5, 2600))),
}


@pytest.mark.parametrize("name", LAYERS_OF_KERAS)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_tables_of_preprocessing_layers(name):
    if name != "Discretization":
        pytest.importorskip("tensorflow")  # which they look up with, on every backend
    lookup = LAYERS_OF_KERAS[name]()
    model = functional(layers.Reshape((8,)), layers.Identity(), lookup, carriers.words())
    before = ids_of(model(IDS))
    assert len(np.unique(before)) > 400
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    np.testing.assert_array_equal(ids_of(model(IDS)), before)
    assert kept_for(report, "carries indices") == {"Reshape", "Identity"}


def test_category_encoding():
    encoding = layers.CategoryEncoding(2600, output_mode="multi_hot")
    inputs = keras.Input((8,))
    hot = encoding(layers.Reshape((8,))(inputs))
    model = keras.Model(inputs, layers.Dense(4)(layers.Dense(4)(hot)))
    before = ops.convert_to_numpy(keras.Model(inputs, hot)(IDS))
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    np.testing.assert_array_equal(ops.convert_to_numpy(keras.Model(inputs, hot)(IDS)), before)
    assert kept_for(report, "carries indices") == {"Reshape"}


def test_raw_inputs_on_their_way_to_preprocessing_layers():
    """Beyond 65504 a Reshape in float16 would make inf of them."""
    inputs = keras.Input((6,))
    raw = layers.Normalization(mean=[1e5] * 2, variance=[1e8] * 2)
    x = raw(layers.Reshape((3, 2), name="reshape")(inputs))
    x = layers.Flatten(name="after")(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(4, name="body")(x)))
    x = 1e5 + 1e4 * kinds.VECTORS
    before = model.predict(x, verbose=0)
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert report.kept["reshape"] == "hands raw inputs to preprocessing layers"
    assert "after" not in report.kept
    np.testing.assert_allclose(model.predict(x, verbose=0), before, atol=20 * 2.0**-11)


def test_angles():
    """The sine of a time stamp is noise if the time is rounded."""
    seconds = keras.Input((1,))
    waves = layers.Lambda(lambda t: ops.sin(t * 2 * np.pi / 86400), name="waves")(
        layers.Reshape((1,), name="reshape")(seconds)
    )
    model = keras.Model(seconds, layers.Dense(2)(layers.Dense(4, name="body")(waves)))
    x = np.random.default_rng(0).uniform(0, 1e6, (64, 1)).astype("float32")
    before = model.predict(x, verbose=0)
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert set(report.kept) >= {"waves", "reshape"} and "body" not in report.kept
    np.testing.assert_allclose(model.predict(x, verbose=0), before, atol=20 * 2.0**-8)


def test_ids_that_are_compared_with_each_other():
    """Attention within segments: float16 would make two segments of 2049 and 2048."""

    class Same(layers.Layer):
        def call(self, ids):
            return ops.cast(ops.equal(ids[:, :, None], ids[:, None, :]), self.compute_dtype)

        def compute_output_shape(self, shape):
            return (*shape, shape[-1])

    inputs = keras.Input((8,))
    same = layers.Flatten()(Same(name="same")(layers.Reshape((8,))(inputs)))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(4, name="body")(same)))
    before = model.predict(IDS, verbose=0)
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert kept_for(report, "carries indices") == {"Reshape", "Same"}
    np.testing.assert_allclose(model.predict(IDS, verbose=0), before, atol=20 * 2.0**-8)


# Models by their own code, which do not say how they are called


@pytest.mark.parametrize("policy", HALVES)
def test_a_model_by_its_own_code_gets_its_inputs_as_they_are(policy):
    half = kmp.Policy(policy).compute_dtype
    for cls, x in ((carriers.Ids, IDS), (carriers.Table, TABLES)):
        model = called(cls(), x)
        check(model, x)
        report = kmp.to_mixed_precision(model, policy)
        check(model, x)
        assert report.kept[model.path] == "carries indices"
        assert not model.dtype_policy.casts_inputs and model.compute_dtype == half
        assert model.words.compute_dtype == half
    assert model.features.compute_dtype == half  # which casts its inputs itself


def test_a_model_called_with_integers_computes_as_without_ids():
    """Keras casts no integers, and so nothing changes for a model that gets them."""
    model = called(carriers.Ids(), IDS.astype("int32"))
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    seen = []
    embed = model.words.call
    model.words.call = lambda ids: seen.append(ids.dtype) or embed(ids)
    check(model, IDS.astype("int32"))
    assert {keras.backend.standardize_dtype(dtype) for dtype in seen} == {"int32"}
    assert keras.backend.standardize_dtype(model.words(IDS).dtype) == "bfloat16"


def test_a_model_whose_operators_mix_dtypes():
    """On TensorFlow float32 times half precision raises: ids must come as integers there."""
    prices = np.ones_like(IDS)
    for ids in (IDS, IDS.astype("int32")):
        model = called(carriers.Two(), [ids, prices])
        report = kmp.to_mixed_precision(model, "mixed_float16")
        if BACKEND == "tensorflow":
            assert report.kept[model.path] == "rounds float indices: pass integers"
            check(model, [IDS.astype("int32"), prices])
        else:
            assert report.kept[model.path] == "carries indices"
            check(model, [ids, prices])


class Scaled(layers.Layer):
    """Multiplies what it looks up by its second input."""

    def __init__(self, multiply, **kwargs):
        super().__init__(**kwargs)
        self.words, self.multiply = carriers.words(), multiply

    def call(self, ids, prices):
        return self.multiply(self.words(ids), prices[..., None])


@pytest.mark.only("tensorflow")  # the others multiply any two dtypes
def test_a_layer_that_mixes_dtypes_stays_in_float32():
    def build(multiply):
        ids, prices = keras.Input((8,)), keras.Input((8,))
        scaled = Scaled(multiply, name="scaled")(ids, prices)
        return carriers.with_table(keras.Model([ids, prices], carriers.head()(scaled)))

    model = build(lambda a, b: a * b)
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert report.kept["scaled"].startswith("mixes indices")
    check(model, [IDS, np.ones_like(IDS)])
    model = build(keras.ops.multiply)
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert report.kept["scaled"] == "carries indices"
    check(model, [IDS, np.ones_like(IDS)])
    model = build(lambda a, b: a * b)
    kmp.to_mixed_precision(model, "mixed_float16", lambda layer, path: layer.name != "scaled")
    check(model, [IDS, np.ones_like(IDS)])


# Positions that a layer counts itself


COUNTED = {
    "range": lambda x: ops.arange(ops.shape(x)[1]),
    "running sum": lambda x: ops.cumsum(ops.ones_like(x[0])) - 1,
}


class Counts(layers.Layer):
    """Adds to its inputs what `use` makes of their positions, in the dtype that it computes in."""

    def __init__(self, count, use, **options):
        super().__init__(**options)
        self.count, self.use = COUNTED[count], use

    def build(self, shape):
        self.table = layers.Embedding(shape[1], 1, dtype=self.dtype_policy)
        self.table.build(None)
        self.table.embeddings.assign(np.arange(shape[1]).reshape(-1, 1) % 7 - 3.0)

    def call(self, x):
        positions = ops.cast(self.count(x), x.dtype)
        if self.use == "waves":
            return x + ops.sin(positions)
        if self.use == "distances":
            return x + ops.pad(positions[1:] - positions[:-1], [(1, 0)])
        return x + self.table(ops.cast(positions, "int32"))[:, 0]


def counting(count, use, size=3000, **options):
    inputs = keras.Input((size,))
    return keras.Model(inputs, layers.Dense(1)(Counts(count, use, **options)(inputs)))


USES = {
    "waves": np.sin(np.arange(3000)),
    "rows": np.arange(3000) % 7 - 3.0,
    "distances": np.sign(np.arange(3000)),
}


@pytest.mark.parametrize(
    ("count", "use"),
    [*itertools.product(COUNTED, ["waves", "rows"]), ("range", "distances")],
)
def test_positions_that_a_layer_counts_are_not_rounded(count, use):
    x, expected = np.zeros((1, 3000), "float32"), USES[use]
    for policy in HALVES:
        model = counting(count, use)
        kmp.to_mixed_precision(model, policy)
        found = ops.convert_to_numpy(ops.cast(model.layers[1](x), "float32"))
        np.testing.assert_allclose(found[0], expected, atol=1e-3)  # sines in float32, of 3,000
        assert kmp.audit(model).of_kind("half indices") == ()


@pytest.mark.parametrize("use", USES)
def test_positions_that_are_rounded_are_named(use):
    keras.config.set_dtype_policy("mixed_float16")
    (finding,) = kmp.audit(counting("range", use)).of_kind("half indices")
    assert "only up to 2048" in finding.problem
    for sound in (counting("range", use, 200), counting("range", use, dtype="float32")):
        assert kmp.audit(sound).of_kind("half indices") == ()


def test_few_positions_that_are_subtracted_cost_no_half_precision():
    """Half precision holds them all, and their differences."""
    model = counting("range", "distances", 2048)
    kmp.to_mixed_precision(model, "mixed_float16")
    assert model.layers[1].compute_dtype == "float16"


# Masks by a number


class Missing(layers.Layer):
    """Counts what is not missing; -1 stands for it."""

    def call(self, x):
        return x * ops.cast(ops.not_equal(x, -1), x.dtype)


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("mask", [layers.Masking, Missing])
def test_what_is_near_the_number_of_a_mask_is_not_masked(mask, policy):
    """Masking compares in the dtype that it computes in, where -0.9999 is -1."""
    inputs = keras.Input((2, 1))
    layer = mask(-1.0) if mask is layers.Masking else mask()
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layer(inputs))))
    x = np.float32([[[-0.9999], [-1.0]]])
    report = kmp.to_mixed_precision(model, policy)
    assert "compares raw inputs with a number" in report.kept.values()
    assert kmp.audit(model).of_kind("half preprocessing") == ()
    np.testing.assert_array_equal(np.ravel(layer(x)), np.float32([-0.9999, 0]))


def test_a_mask_in_half_precision_is_named_once():
    """No other number helps a mask beyond float16: the data have this one."""
    keras.config.set_dtype_policy("mixed_float16")
    for number in (-1.0, 99999.0):
        model = functional_mask(layers.Masking(number))
        (finding,) = kmp.audit(model).findings
        assert finding.kind == "half preprocessing" and 'dtype="float32"' in finding.advice
        assert kmp.audit(functional_mask(layers.Masking(number, dtype="float32"))).findings == ()
    assert kmp.audit(functional_mask(layers.Masking(0.0))).findings == ()


def functional_mask(layer):
    inputs = keras.Input((4, 8))
    pooled = layers.GlobalMaxPooling1D()(layer(inputs))
    return keras.Model(inputs, layers.Dense(8, dtype="float32")(pooled))


# Thresholds

PRICES = np.arange(990, 1010, dtype="float32")[:, None]  # 992 to 1008 are three in bfloat16
EDGES = [500.0, 1000.0]


def as_edges(x):
    return ops.convert_to_tensor(EDGES, dtype=x.dtype)


ORDERS = {
    "at least": lambda x: ops.where(x >= 1000, 1, 0),
    "less": lambda x: ops.where(ops.less(x, 1000.0), 1, 0),
    "each of several": lambda x: ops.sum(ops.where(x >= as_edges(x), 1, 0), axis=-1, keepdims=True),
    "bins": lambda x: ops.digitize(x, EDGES),
    "places": lambda x: ops.searchsorted(as_edges(x), x[:, 0], side="right")[:, None],
    "each other": lambda x: ops.where(x > ops.flip(x, axis=0), 1, 0),
}


class Ordered(layers.Layer):
    def __init__(self, name, **kwargs):
        super().__init__(**kwargs)
        self.name_of_order = name

    def call(self, x):
        return ops.cast(ORDERS[self.name_of_order](x), self.compute_dtype)


def of_prices(name, **kwargs):
    last = layers.Dense(1, kernel_initializer="identity", dtype="float32")
    return keras.Sequential([layers.Input((1,)), Ordered(name, **kwargs), last])


@pytest.mark.parametrize("name", ORDERS)
def test_raw_inputs_are_not_rounded_before_their_order_is_asked_for(name):
    model = of_prices(name)
    exact = ops.convert_to_numpy(model(PRICES))
    assert len(np.unique(exact)) == 2
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert "compares raw inputs with a threshold or each other" in report.kept.values()
    np.testing.assert_array_equal(ops.convert_to_numpy(model(PRICES)), exact)
    keras.config.set_dtype_policy("mixed_bfloat16")
    rounded = of_prices(name)
    assert (ops.convert_to_numpy(rounded(PRICES)) != exact).any()
    assert bool(rounded_inputs(rounded)) == (name in ("at least", "less"))
    advised = of_prices(name, dtype="float32")
    assert rounded_inputs(advised) == []
    np.testing.assert_array_equal(ops.convert_to_numpy(advised(PRICES)), exact)


def test_half_precision_holds_whole_numbers_around_a_small_threshold():
    keras.config.set_dtype_policy("mixed_float16")
    assert rounded_inputs(of_prices("at least")) == []  # whole numbers up to 2048


# Raw inputs that something is subtracted from

YEARS = np.arange(1995, 2026, dtype="float32")[:, None]  # five numbers in bfloat16


def normalization(**dtype):
    initializers = keras.initializers.Constant(2010), keras.initializers.Constant(80)
    names = "moving_mean_initializer", "moving_variance_initializer"
    return layers.BatchNormalization(**dict(zip(names, initializers, strict=True)), **dtype)


def beside_2000(layer):
    return [layers.Lambda(lambda x: ops.concatenate([x, 0 * x + 2000], axis=-1)), layer]


SUBTRACTED = {
    "normalization": lambda: [normalization()],
    "on its way": lambda: [layers.Reshape((1,)), layers.Dropout(0.1), normalization()],
    "wrapped": lambda: [
        layers.Reshape((1, 1)),
        layers.TimeDistributed(normalization()),
        layers.Flatten(),
    ],
    "layer normalization": lambda: beside_2000(layers.LayerNormalization(epsilon=50.0)),
    "group normalization": lambda: beside_2000(layers.GroupNormalization(1, epsilon=50.0)),
    "a list": lambda: [layers.Lambda(lambda x: (x - ops.cast([2010.0] * 2, x.dtype)) / 9)],
    "a multiple": lambda: [layers.Lambda(lambda x: ops.mod(x, 64.0) / 9)],
    "each other": lambda: beside_2000(layers.Lambda(lambda x: x[:, :1] - x[:, 1:])),
}
BY_A_NUMBER = lambda: [layers.Lambda(lambda x: (x - 2010) / 9)]  # noqa: E731


def of_years(stack):
    last = layers.Dense(1, kernel_initializer="identity")
    return keras.Sequential([layers.Input((1,)), *stack, last])


class OfYears(keras.Model):
    """A model by its own code, which Keras gives its inputs in half precision."""

    def __init__(self, add):
        super().__init__()
        self.first = normalization()
        self.body, self.last = (layers.Dense(1, kernel_initializer="ones") for _ in range(2))
        self.add = add

    def call(self, x):
        y = self.body(self.first(x))
        return self.last(y + x if self.add else y)


def told_apart(model):
    return len(np.unique(model.predict(YEARS, verbose=0)))


def rounded_inputs(model):
    return [each.path for each in kmp.audit(model).of_kind("half preprocessing")]


@pytest.mark.parametrize("name", [*SUBTRACTED, "a number"])
def test_raw_inputs_are_not_rounded_before_a_subtraction(name):
    stack = {**SUBTRACTED, "a number": BY_A_NUMBER}[name]
    model = of_years(stack())
    assert told_apart(model) == len(YEARS)
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert told_apart(model) == len(YEARS)
    assert any("raw inputs that" in reason for reason in report.kept.values())
    assert not any("uncast" in row.after for row in report.rows)  # Keras loads it without kmp
    assert rounded_inputs(model) == []

    keras.config.set_dtype_policy("mixed_bfloat16")
    model = of_years(stack())
    assert told_apart(model) < len(YEARS) / 2
    # 1 - x is that of a mask more often.
    assert bool(rounded_inputs(model)) == (name != "a number")


def test_a_model_by_its_own_code_does_not_round_them_either():
    model = OfYears(add=False)
    model(YEARS)
    assert told_apart(model) == len(YEARS)
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert told_apart(model) == len(YEARS)
    assert kept_for(report, "carries raw inputs that are normalized") == {
        "OfYears",
        "BatchNormalization",
    }


def test_a_model_whose_code_adds_them_to_half_numbers_is_converted_all_the_same():
    """TensorFlow adds no float32 to bfloat16: there the inputs are rounded, as Keras does."""
    model = OfYears(add=True)
    model(YEARS)
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    kept = kept_for(report, "carries raw inputs that are normalized")
    assert ("OfYears" in kept) == (BACKEND != "tensorflow")
    assert model.compute_dtype == model.body.compute_dtype == "bfloat16"


def test_the_advice_for_a_normalization_works():
    keras.config.set_dtype_policy("mixed_bfloat16")
    (finding,) = kmp.audit(of_years([normalization()])).of_kind("half preprocessing")
    assert "to bfloat16 before their mean is subtracted" in finding.problem
    assert 'dtype="float32", or convert the model' in finding.advice
    model = of_years([normalization(dtype="float32")])
    assert rounded_inputs(model) == []
    assert told_apart(model) == len(YEARS)


def test_activations_and_masks_are_rounded_as_ever():
    keras.config.set_dtype_policy("mixed_bfloat16")
    sound = (
        [layers.Dense(4), normalization()],
        [layers.Dense(4), layers.Lambda(lambda x: x - ops.mean(x, axis=-1, keepdims=True))],
        [layers.LayerNormalization()],  # Keras casts no inputs of it
        [layers.Lambda(lambda mask: (1 - mask) * -1e4)],
    )
    for stack in sound:
        assert rounded_inputs(of_years(stack)) == []


class Masked(layers.Layer):
    """Code with a weight, which could not do with float32 inputs on TensorFlow."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, mask):
        return (1 - mask) * self.scale


class Gated(Masked):
    def call(self, x):
        return ops.where(x > 2010, x, 0.0) * self.scale


@pytest.mark.parametrize("code", [Masked, Gated])
def test_code_with_weights_computes_in_half_precision(code):
    model = of_years([code(name="by_code")])
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert code.__name__ not in {row.layer for row in report.rows if row.reason}
    assert model.get_layer("by_code").compute_dtype == "bfloat16"


# What stays as it was


SOUND = {
    "comparison": lambda x: layers.Masking()(layers.Reshape((6, 1))(x)),
    "threshold": lambda x: layers.Lambda(lambda x: ops.where(x > 0, x, 0.0))(x),
    "largest": lambda x: ops.one_hot(ops.argmax(layers.Dropout(0.1)(x), axis=-1), 6),
    "bytes": lambda x: layers.Lambda(lambda x: ops.cast(ops.cast(x, "uint8"), x.dtype))(x),
    "sampling": lambda x: layers.Embedding(9, 4)(ops.cast(layers.Dense(5)(x), "int32")),
    "shape": lambda x: layers.Lambda(lambda x: x * ops.cast(ops.shape(x)[1], x.dtype))(x),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_no_index_is_converted(name):
    inputs = keras.Input((6,))
    x = layers.Flatten()(SOUND[name](layers.Reshape((6,))(inputs)))
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(4)(x)))
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert set(report.kept.values()) == {"output layer"}


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_models_without_float_ids_are_converted_as_ever(kind):
    model, _ = kinds.KINDS[kind]()
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    reasons = set(report.kept.values())
    allowed = {"output layer", "preprocessing of raw inputs"}
    if kind == "spectral_normalization":
        allowed.add("updates its state, which half precision would round")
    assert reasons <= allowed | {each for each in reasons if each.startswith("inside ")}


# Policies, files, training


@pytest.mark.filterwarnings("ignore:Weights in float16")
@pytest.mark.parametrize("policy", ["bfloat16", "float16", "p=f32,c=bf16,o=f32"])
def test_other_policies(policy):
    stack = [layers.Reshape((8,)), carriers.Own()]
    model = functional(*stack)
    kmp.to_mixed_precision(model, policy)
    check(model)
    assert stack[0].compute_dtype == "float32"
    assert stack[1].variable_dtype == kmp.Policy(policy).param_dtype
    kmp.to_mixed_precision(model, "mixed_float16")  # and from one to the next
    check(model)


def test_autocast():
    stack = [layers.Reshape((8,)), carriers.Positions()]
    model = functional(*stack)
    kmp.to_mixed_precision(model, "autocast")
    with kmp.autocast("mixed_bfloat16"):
        np.testing.assert_array_equal(ids_of(model(IDS)), IDS)
        assert stack[1].words.compute_dtype == "bfloat16"


def test_back_to_float32():
    stack = [layers.Reshape((8,)), carriers.Own()]
    model = functional(*stack)
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    report = kmp.to_mixed_precision(model, "float32")
    assert report.kept == {}
    assert {str(x.dtype_policy.name) for x in layers_of(model)} == {"float32"}
    assert type(stack[1].dtype_policy) is keras.DTypePolicy  # which casts them


@keras.saving.register_keras_serializable(package="carriers")
class Saved(carriers.Own):
    pass


@keras.saving.register_keras_serializable(package="carriers")
class SavedPositions(carriers.Positions):
    pass


def test_files_and_training(tmp_path):
    """A converted model trains, and a file brings back how each layer treats its inputs."""
    inputs = keras.Input((8,))
    ids = layers.Reshape((8,), name="reshape")(inputs)
    x = layers.Concatenate()([Saved(name="own")(ids), SavedPositions(name="positions")(ids)])
    model = carriers.with_table(keras.Model(inputs, layers.Dense(2)(x)))
    model.compile("sgd", "mse")
    model.fit(IDS, np.zeros((64, 8, 2)), verbose=0)
    weights = [v.numpy() for v in model.trainable_variables]
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert int(model.optimizer.iterations) == 2
    for old, new in zip(weights, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, new.numpy())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for name in ("reshape", "own", "positions"):
        layer = loaded.get_layer(name)
        assert str(kmp.get_policy(layer.dtype_policy)) == (
            "float32" if name == "reshape" else "mixed_bfloat16,i=uncast"
        )
    np.testing.assert_array_equal(*(m.predict(IDS, verbose=0) for m in (model, loaded)))
    before = loaded.get_layer("own").table.numpy()
    loaded.fit(IDS, np.ones((64, 8, 2)), verbose=0)
    moved = np.flatnonzero((loaded.get_layer("own").table.numpy() != before).any(axis=1))
    assert set(moved) == set(IDS.ravel())  # each id has trained its own row


def test_a_file_of_a_model_by_its_own_code(tmp_path):
    model = called(carriers.Ids(), IDS)
    kmp.to_mixed_precision(model, "mixed_float16")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not loaded.dtype_policy.casts_inputs and loaded.reshape.compute_dtype == "float32"
    check(loaded)


def test_the_tools_round_no_ids_either():
    """They swap the policies of a model for a while."""
    model = functional(carriers.Own())
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert model.layers[1].dtype_policy.casts_inputs is False
    assert kmp.debug.compare_precisions(model, IDS).output_sqnr == np.inf  # exact in bfloat16
    assert kmp.debug.diagnose(model, IDS).float32_layers == ()
    check(model)


# Models that are built under a mixed policy


def native(*stack, policy="mixed_float16"):
    keras.config.set_dtype_policy(policy)
    return functional(*[each() for each in stack], carriers.words())


def half_indices(model):
    return kmp.audit(model).of_kind("half indices")


def test_the_audit_names_each_layer_and_its_advice_works():
    reshape, absolute = lambda **x: layers.Reshape((8,), **x), carriers.Absolute
    model = native(reshape, absolute)
    assert not np.array_equal(ids_of(model(IDS)), IDS)
    found = half_indices(model)
    assert [each.path for each in found] == ["reshape", "absolute"]
    assert "float16, which holds every whole number only up to 2048" in found[0].problem
    assert 'dtype="float32", or convert the model with kmp.to_mixed' in found[0].advice
    # One after the other: the second rounds as well.
    model = native(lambda: reshape(dtype="float32"), absolute)
    assert [each.path for each in half_indices(model)] == [model.layers[2].path]
    model = native(lambda: reshape(dtype="float32"), lambda: absolute(dtype="float32"))
    assert half_indices(model) == ()
    check(model)
    model = native(reshape, absolute)
    kmp.to_mixed_precision(model, "mixed_float16")
    assert half_indices(model) == ()
    check(model)


def test_the_advice_for_layers_with_weights_works():
    keras.config.set_dtype_policy("mixed_bfloat16")
    for cls in (carriers.Own, carriers.Positions):
        (finding,) = half_indices(functional(cls()))
        assert "bfloat16, which holds every whole number only up to 256" in finding.problem
        assert 'dtype=kmp.Policy("mixed_bfloat16,i=uncast")' in finding.advice
        model = functional(cls(dtype=kmp.Policy("mixed_bfloat16,i=uncast")))
        assert half_indices(model) == ()
        check(model)
        model = functional(cls())
        kmp.to_mixed_precision(model, "mixed_bfloat16")
        assert half_indices(model) == ()
        check(model)


def test_the_audit_of_a_model_by_its_own_code():
    """Only a tensor with features in it is surely one of floats."""
    keras.config.set_dtype_policy("mixed_float16")
    model = called(carriers.Table(), TABLES)
    (finding,) = half_indices(model)
    assert finding.path == model.path
    model = called(carriers.Table(dtype=kmp.Policy("mixed_float16,i=uncast")), TABLES)
    assert half_indices(model) == ()
    check(model, TABLES)
    for x in (IDS, IDS.astype("int32")):
        assert half_indices(called(carriers.Ids(), x)) == ()


def test_the_audit_finds_what_casts_by_itself():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((8,), dtype="int32")
    model = functional(carriers.ToComputeDtype(), carriers.words(), inputs=inputs)
    (finding,) = half_indices(model)
    assert finding.path.startswith("to_compute_dtype") and 'dtype="float32"' in finding.advice
    model = functional(carriers.ToComputeDtype(dtype="float32"), carriers.words(), inputs=inputs)
    assert half_indices(model) == ()


@pytest.mark.parametrize("size, found", [(2048, 0), (2049, 1)])
def test_half_precision_holds_the_indices_of_a_small_table(size, found):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((8,))
    rows = layers.Embedding(size, 2)(layers.Reshape((8,))(inputs))
    assert len(half_indices(keras.Model(inputs, layers.Dense(2)(rows)))) == found
    # Of what was computed with, a small table is no bound.
    rows = layers.Embedding(size, 2)(layers.Lambda(lambda x: x / 100)(inputs))
    assert len(half_indices(keras.Model(inputs, layers.Dense(2)(rows)))) == 1


def test_the_audit_of_raw_inputs_and_its_advice():
    keras.config.set_dtype_policy("mixed_float16")

    def build(dtype):
        inputs = keras.Input((6,))
        raw = layers.Normalization(mean=[1e5] * 2, variance=[1e8] * 2, dtype="float32")
        x = raw(layers.Reshape((3, 2), name="reshape", dtype=dtype)(inputs))
        return keras.Model(inputs, layers.Dense(2)(x))

    x = 1e5 + 1e4 * kinds.VECTORS
    (finding,) = kmp.audit(build("mixed_float16")).of_kind("half preprocessing")
    assert finding.path == "reshape" and 'dtype="float32"' in finding.advice
    assert not np.isfinite(ops.convert_to_numpy(build("mixed_float16")(x))).all()
    model = build("float32")
    assert kmp.audit(model).of_kind("half preprocessing") == ()
    assert np.isfinite(ops.convert_to_numpy(model(x))).all()


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_sound_models_have_no_finding(kind):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, _ = kinds.KINDS[kind]()
    assert half_indices(model) == ()

"""A budget chooses which blocks are computed again; the bytes are XLA's."""

import importlib.util
import types

import keras
import numpy as np
import pytest
from older import of_keras

import kmp
from kmp._backend import backend
from kmp._backend.types import PlannedProgram
from kmp._keras.blocks import is_recomputed, policy_in, recomputed_in
from kmp._keras.segments import Segment
from kmp._keras.training import build_for_training, notes_placements

X = np.zeros((8, 16), "float32")


def make_model(blocks=6, width=16, optimizer="adam", activation="gelu"):
    keras.utils.set_random_seed(0)
    parts = [
        keras.Sequential([keras.layers.Dense(4 * width, activation), keras.layers.Dense(width)])
        for _ in range(blocks)
    ]
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(width), *parts])
    model.compile(kmp.scaled(optimizer), "mse")
    return model


def recomputed(model):
    return [is_recomputed(layer) for layer in model.layers]


@pytest.fixture
def planned(monkeypatch):
    """A compiler for which activations take `1000 - 100` a block that is computed again.

    Or less what `saves` says. Weights and slots come on top, as many bytes as they are.
    """
    compiled = []

    def saves(model):
        return 100 * sum(recomputed(model))

    def planned_step(model, x, y, device=None):
        size = keras.tree.flatten(x)[0].shape[0]
        again = sum(recomputed(model))
        compiled.append((size, again))
        activations = (1000 - planned_step.saves(model)) * size // 8
        return PlannedProgram(held(model) + activations, 10.0 + again)

    planned_step.saves, planned_step.compiled = saves, compiled
    monkeypatch.setattr(backend, "planned_step", planned_step)
    return planned_step


pytestmark = [
    pytest.mark.only("jax"),
    pytest.mark.skipif(notes_placements(keras.Model), reason="Keras before 3.12 is refused"),
]


def held(model):
    """Bytes of weights and slots."""
    return sum(v.value.nbytes for v in [*model.variables, *model.optimizer.variables])


def gradients(model):
    """Bytes of the gradients."""
    return sum(v.value.nbytes for v in model.trainable_variables)


def plan_of(model, budget, **arguments):
    return kmp.debug.memory_plan(model, X, X, budget, device="h100", **arguments)


def plan_above(model, activations, **arguments):
    """The plan for a budget of weights, slots and so many bytes."""
    build_for_training(model, X, X)
    return plan_of(model, held(model) + activations, **arguments)


def test_a_step_that_fits_is_left_alone(planned):
    plan = plan_above(make_model(), 1000)
    assert (plan.fits, plan.paths, plan.advice) == (True, (), ())
    assert planned.compiled == [(8, 0)]


def test_the_first_blocks_are_taken_until_it_fits(planned):
    model = make_model()
    plan = plan_above(model, 600)
    assert plan.fits and plan.step == (8, 4, held(model) + 600, 1.4, "")
    assert plan.paths == tuple(layer.path for layer in model.layers[1:5])
    assert planned.compiled == [(8, 0), (8, 1), (8, 2), (8, 4)]  # two of a kind, then the plan
    assert not any(recomputed(model))
    kmp.recompute(model, lambda layer, path: path in plan.paths)
    assert recomputed(model) == [False] + [True] * 4 + [False] * 2


def test_where_later_blocks_save_less_more_are_taken(planned):
    planned.saves = lambda model: (
        100 * min(sum(recomputed(model)), 2) + 50 * max(sum(recomputed(model)) - 2, 0)
    )
    plan = plan_above(make_model(), 660)
    assert plan.fits and plan.step.blocks == 5
    assert planned.compiled == [(8, 0), (8, 1), (8, 2), (8, 4), (8, 5)]


def test_blocks_of_several_kinds_save_each_its_own(planned):
    keras.utils.set_random_seed(0)
    small, large = (
        [keras.Sequential([keras.layers.Dense(n), keras.layers.Dense(16)]) for _ in range(3)]
        for n in (8, 64)
    )
    model = keras.Sequential([keras.Input((16,)), *small, *large])
    model.compile(kmp.scaled("adam"), "mse")
    planned.saves = lambda model: sum(
        (10 if layer in small else 100) for layer in model.layers if is_recomputed(layer)
    )
    plan = plan_above(model, 800)
    assert plan.fits and plan.step.blocks == 5  # 30 of the small ones, 200 of two large ones
    assert planned.compiled == [(8, 0), (8, 1), (8, 2), (8, 1), (8, 5)]


def in_int8(model, **options):
    """Bytes of weights and slots with slots in int8."""
    other = keras.models.clone_model(model)
    other.compile(kmp.scaled("adam", slot_dtype="int8", **options), "mse")
    build_for_training(other, X, X)
    return held(other)


def test_where_all_blocks_are_not_enough_slots_are_int8_and_fewer_blocks_do(planned):
    model = make_model()
    optimizer = model.optimizer
    build_for_training(model, X, X)
    saved = held(model) - in_int8(model)
    planned.saves = lambda model: saved // 4 * sum(recomputed(model)) // 6
    plan = plan_above(model, 1000 - saved - saved // 9)
    assert plan.fits and plan.step.memory == 'slot_dtype="int8"' and plan.step.blocks == 3
    assert plan.step.bytes == in_int8(model) + 1000 - saved // 4 * 3 // 6
    assert planned.compiled == [(8, 0), (8, 1), (8, 2), (8, 6), (8, 3)]
    *_, memory, blocks = str(plan).splitlines()
    assert memory == 'model.compile(kmp.scaled(..., slot_dtype="int8"), ...)'
    assert blocks == "kmp.recompute(model, lambda layer, path: path in plan.paths)"
    assert model.optimizer is optimizer


@pytest.mark.parametrize("optimizer", ["adam", keras.optimizers.LossScaleOptimizer])
def test_an_optimizer_of_keras_is_planned_in_int8_too(planned, optimizer):
    model = make_model()
    given = optimizer if isinstance(optimizer, str) else optimizer(keras.optimizers.Adam())
    model.compile(given, "mse")
    plan = plan_of(model, in_int8(model) + 500)
    assert plan.fits and plan.step.memory == 'slot_dtype="int8"'
    assert plan.step.bytes <= in_int8(model) + 500


def test_remainders_of_bfloat16_weights_are_made_smaller_last(planned):
    keras.config.set_dtype_policy("bfloat16")
    model = make_model()
    keras.config.set_dtype_policy("float32")
    model.compile(kmp.scaled("adam", slot_dtype="int8", master_weights=True), "mse")
    smallest = in_int8(model, master_weights=24)
    plan = plan_of(model, smallest + 400)
    assert plan.fits and plan.step.memory == 'slot_dtype="int8", master_weights=24'
    assert not plan_of(model, smallest + 390).fits


def test_what_does_not_fit_is_told_what_else_there_is(planned):
    planned.saves = lambda model: 10 * sum(recomputed(model)) - 10**6
    model = make_model()
    plan = plan_above(model, 4 * 10**5)
    assert not plan.fits and plan.step.blocks == 6
    batch, *states = plan.advice
    line = "kmp.recompute(model, lambda layer, path: path in plan.paths)"
    assert f"A batch of 2 with gradient_accumulation_steps=4 fits with {line}, at" in batch
    assert planned.compiled[-2:] == [(4, 6), (2, 6)]
    assert 'slot_dtype="int8"' in states[0] and "bfloat16" in states[1]
    assert "does not fit" in str(plan)


def test_a_smaller_batch_may_need_slots_in_int8(planned):
    planned.saves = lambda model: -(10**6)
    model = make_model()
    plan = plan_of(model, in_int8(model) + gradients(model) + 130_000)
    assert not plan.fits
    assert plan.advice[0].startswith(
        "A batch of 1 with gradient_accumulation_steps=8 fits with "
        'kmp.scaled(..., slot_dtype="int8"), at'
    )


@pytest.mark.parametrize("budget", [805, 815])
def test_where_more_blocks_take_more_the_smallest_step_is_the_plan(planned, budget):
    """Two save 60 each, the third 70, and what XLA adds for the next takes more."""
    planned.saves = lambda model: (
        1000 - 1000 * (1000 - (0, 60, 120, 190, 80, 0, -80)[sum(recomputed(model))])
    )
    model = make_model(optimizer="sgd")  # no slots to make smaller
    plan = plan_above(model, 1000 * budget)
    assert plan.step == (8, 3, held(model) + 810_000, 1.3, "") and plan.fits == (budget == 815)
    assert planned.compiled[:6] == [(8, 0), (8, 1), (8, 2), (8, 4), (8, 6), (8, 3)]
    if not plan.fits:
        assert plan.advice[0].startswith(
            "A batch of 4 with gradient_accumulation_steps=2 fits with kmp.recompute("
        )
        assert planned.compiled[-1] == (4, 3)


def test_what_is_known_to_do_is_taken_where_the_line_has_passed_it_by(planned):
    """The second saves less than the others, and more than four take more."""
    model = make_model()
    build_for_training(model, X, X)
    saved = held(model) - in_int8(model)
    bytes_of = (0, 300, 310, 700, 900, 100, 50)
    planned.saves = lambda model: bytes_of[sum(recomputed(model))]
    plan = plan_above(model, 105 - saved)
    assert plan.fits and plan.step.blocks == 4 and plan.step.memory == 'slot_dtype="int8"'


def test_blocks_that_save_nothing_are_left_alone(planned):
    planned.saves = lambda model: -50 * sum(recomputed(model)) - 10**6
    model = make_model(optimizer="sgd")
    plan = plan_above(model, 900_000)
    assert not plan.fits and plan.step.blocks == 0 and plan.paths == ()
    assert plan.advice[0].startswith("A batch of 4 with gradient_accumulation_steps=2 fits, at")
    assert planned.compiled[-1] == (4, 0)


@pytest.mark.parametrize("scaled", [kmp.scaled, keras.optimizers.LossScaleOptimizer])
@pytest.mark.parametrize(("accumulated", "steps"), [(None, 4), (3, 12)])
def test_the_smaller_batch_fits_with_the_sum_of_the_gradients(planned, accumulated, steps, scaled):
    planned.saves = lambda model: -(10**6)
    model = make_model(blocks=1)
    sgd = keras.optimizers.SGD(gradient_accumulation_steps=accumulated)
    model.compile(scaled(sgd), "mse")
    # Half of the batch would fit but for the sum.
    budget = 10**6 // 2 + gradients(model) // 2 - (gradients(model) if accumulated else 0)
    build_for_training(model, X, X)
    budget += held(model)
    plan = plan_of(model, budget)
    advice = plan.advice[0]
    assert f"A batch of 2 with gradient_accumulation_steps={steps} fits, at" in advice
    other = make_model(blocks=1)
    sgd = keras.optimizers.SGD(gradient_accumulation_steps=steps)
    other.compile(scaled(sgd), "mse")
    build_for_training(other, X, X)
    found = planned(other, X[:2], X[:2]).bytes
    assert found <= budget and f"at {found / 1e9:.3g} GB by XLA" in advice


def several(body, head):
    """Two optimizers, one for the kernels and one for the rest."""
    choose = of_keras("optimizers.OptimizerMap")(head, {".*kernel": body})
    return keras.optimizers.MultiOptimizer(choose)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [(None, 4, "=4 in its optimizers"), (3, 12, "=4 and 12 in its optimizers")],
)
def test_each_of_several_optimizers_sums_the_gradients(planned, before, after, said):
    def make(first, second):
        model = make_model(blocks=1)
        parts = keras.optimizers.SGD(), keras.optimizers.SGD()
        for part, number in zip(parts, (first, second), strict=True):
            part.gradient_accumulation_steps = number
        model.compile(kmp.scaled(several(*parts)), "mse")
        build_for_training(model, X, X)
        return model

    planned.saves = lambda model: -(10**6)
    model, followed = make(before, None), make(after, 4)
    budget = planned(followed, X[:2], X[:2]).bytes
    advice = plan_of(model, budget).advice[0]
    assert f"A batch of 2 with gradient_accumulation_steps{said} fits, at" in advice
    assert f"at {budget / 1e9:.3g} GB by XLA" in advice


def test_an_optimizer_whose_parts_a_function_chooses_is_refused(planned):
    sgd = keras.optimizers.SGD()
    model = make_model(1)
    model.compile(kmp.scaled(of_keras("optimizers.MultiOptimizer")(lambda v: sgd)), "mse")
    with pytest.raises(ValueError, match=r"whose parts a function.*OptimizerMap instead"):
        plan_of(model, 1e9)
    model.compile(kmp.scaled(several(sgd, sgd)), "mse")
    assert plan_of(model, 1e9).fits


def test_a_smaller_batch_without_targets(planned, monkeypatch):
    planned.saves = lambda model: -(10**6)
    monkeypatch.setattr("kmp.debug.budget.build_for_training", lambda model, x, y: None)
    model = make_model(blocks=2, optimizer="sgd")
    build_for_training(model, X, X)
    plan = kmp.debug.memory_plan(model, X, None, held(model) + 600_000, device="h100")
    assert plan.advice[0].startswith("A batch of 4 with")


class WithoutTargets(keras.Model):
    """Its step takes what `fit` hands it where there are no targets: the dict itself."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(16)

    def call(self, inputs):
        outputs = self.dense(inputs["x"])
        self.add_loss(keras.ops.mean(outputs**2))
        return outputs

    def train_step(self, state, data):
        assert set(data) == {"x"}
        return super().train_step(state, data)


def test_a_step_is_compiled_for_the_data_of_fit():
    model = WithoutTargets()
    model({"x": X})
    model.compile(kmp.scaled("adam"))
    build_for_training(model, {"x": X}, None)
    assert backend.planned_step(model, {"x": X}, None).bytes > held(model)


@pytest.mark.parametrize("platform", ["cuda", "tpu", None])
def test_a_product_that_xla_finds_no_tiles_for_is_compiled_without_triton(platform):
    import jax

    from kmp._backend.jax.cards import compiled_for

    tried = []

    class Program:
        def compile(self, compiler_options=None):
            tried.append(compiler_options)
            if not compiler_options:
                raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes")
            return self

    program, device = Program(), platform and types.SimpleNamespace(platform=platform)
    if platform == "cuda":
        assert compiled_for(program, device) is program
        assert tried == [None, {"xla_gpu_enable_triton_gemm": False}]
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="tile sizes"):
            compiled_for(program, device)
        assert tried == [None]


def test_a_model_that_takes_one_size_of_batch_gets_the_other_advice():
    """Its loss is written for eight rows, as that of a retrieval model over its batch."""
    model = make_model(blocks=2, optimizer="sgd")
    names = keras.ops.eye(8, 16)
    model.compile("sgd", lambda y, y_pred: keras.ops.mean((y_pred - names) ** 2))

    def whole_step(model, x, y, device=None):
        arrays = [np.zeros(each.shape, "float32") for each in (x, y)]
        value = model.compute_loss(y=arrays[1], y_pred=model(arrays[0]))
        return PlannedProgram(10**6 if value.shape == () else 0, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "planned_step", whole_step)
        plan = plan_of(model, 1000)
    assert not plan.fits and plan.step.batch_size == 8
    assert plan.advice[0].startswith("No smaller batch can be planned: with 4 samples the step")
    assert "bfloat16" in plan.advice[-1]


def test_a_layer_alone_gets_the_advice_alone(planned):
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16)])
    model.compile(kmp.scaled("adam"), "mse")
    plan = plan_of(model, 100)
    assert not plan.fits and plan.paths == () and len(plan.advice) >= 2
    assert "No smaller batch" in plan.advice[0]
    assert planned.compiled[0] == (8, 0)


def flat_model():
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(16, "tanh", name=f"dense{i}") for i in range(16)]
    model = keras.Sequential([keras.Input((16,)), *stack])
    model.compile(kmp.scaled("adam"), "mse")
    return model


def test_a_model_without_blocks_is_planned_in_segments(planned):
    """Of 16 equal layers segments of 4 are best: each saves three outputs, the last is left."""
    planned.saves = lambda model: sum(100 * (len(x.nodes) - 1) for x in recomputed_in(model))
    model = flat_model()
    plan = plan_above(model, 300)
    assert plan.blocks == ("dense3", "dense7", "dense11")
    assert plan.fits and plan.paths == ("dense3", "dense7", "dense11")
    assert [step.bytes - held(model) for step in plan.steps] == [1000, 700, 400, 100]
    assert recomputed_in(model) == []
    assert str(plan).splitlines()[-1] == "kmp.recompute(model, segments=plan.paths)"
    assert kmp.recompute(model, segments=plan.paths).paths == plan.paths
    assert plan_above(model, 700).paths == ("dense3",)
    assert len(recomputed_in(model)) == 3  # as before the plan


def test_where_blocks_do_not_save_enough_segments_are_planned(planned):
    def saves(model):
        pieces = recomputed_in(model)
        return (200 if pieces and isinstance(pieces[0], Segment) else 10) * len(pieces)

    planned.saves = saves
    model = make_model(optimizer="sgd")
    plan = plan_above(model, 700)
    assert plan.fits and plan.call == "kmp.recompute(model, segments=plan.paths)"
    assert plan.step.bytes == held(model) + 1000 - 200 * plan.step.blocks and plan.step.blocks == 2
    assert plan.steps[0].blocks == 0 and planned.compiled.count((8, 0)) == 1 + len(plan.steps) - 1
    exec(plan.call, {"kmp": kmp, "model": model, "plan": plan})
    assert len(recomputed_in(model)) == 2
    chosen = plan_above(model, 700, filter_fn=lambda layer, path: "sequential" in path)
    assert not chosen.fits  # as the user has chosen the blocks


class TwoEncoders(keras.Model):
    """Both are built by themselves, so that their blocks have the same paths."""

    def __init__(self):
        super().__init__()
        self.encoders = [self.encoder(), self.encoder()]

    def encoder(self):
        inputs = x = keras.Input((16,))
        for i in range(3):
            stack = [keras.layers.Dense(64, "gelu"), keras.layers.Dense(16)]
            x = keras.Sequential([keras.Input((16,)), *stack], name=f"block{i}")(x)
        return keras.Model(inputs, x)

    def call(self, x):
        return self.encoders[0](x) + self.encoders[1](x)


def test_blocks_of_one_path_are_planned_together(planned):
    """As in CLIP, of which the printed line chose twice as many as the plan."""

    def again(model):
        return [x for encoder in model.encoders for x in encoder.layers if is_recomputed(x)]

    planned.saves = lambda model: 100 * len(again(model))
    model = TwoEncoders()
    model(X)
    model.compile(kmp.scaled("adam"), "mse")
    everything = lambda layer, path: layer.name.startswith("block")  # noqa: E731
    plan = plan_above(model, 600, filter_fn=everything)
    assert plan.blocks == ("block0", "block1", "block2") and plan.paths == ("block0", "block1")
    assert plan.fits and plan.step.bytes == held(model) + 600
    exec(plan.call, {"kmp": kmp, "model": model, "plan": plan})
    assert len(again(model)) == 4
    assert planned(model, X, X).bytes == plan.step.bytes


def test_segments_are_chosen_as_in_recompute(planned):
    model = make_model()
    names = [layer.name for layer in model.layers]
    plan = plan_above(model, 1000, segments=[names[2], names[4]])
    assert plan.blocks == (names[2], names[4])
    with pytest.raises(ValueError, match="of memory_plan must be a whole number"):
        plan_above(model, 1000, segments=1)


def test_a_policy_is_planned_and_named(planned, monkeypatch):
    seen, plain = [], backend.planned_step

    def planned_step(model, *arguments):
        seen.append((sum(recomputed(model)), policy_in(model)))
        return plain(model, *arguments)

    monkeypatch.setattr(backend, "planned_step", planned_step)
    model = make_model()
    plan = plan_above(model, 800, policy="dots_saveable")
    policy = backend.recompute_policy("dots_saveable")
    assert seen == [(0, None), (1, policy), (2, policy)]
    *_, line = str(plan).splitlines()
    assert line.endswith("path in plan.paths, policy='dots_saveable')")
    exec(line, {"kmp": kmp, "model": model, "plan": plan})
    assert recomputed(model)[1:4] == [True, True, False] and policy_in(model) is policy
    with pytest.raises(ValueError, match="dots_saveable"):
        plan_of(model, 1e9, policy="dots")
    assert policy_in(model) is policy


def test_blocks_that_were_computed_again_still_are(planned):
    model = make_model()
    kmp.recompute(model, lambda layer, path: layer in model.layers[2:4])
    before = recomputed(model)
    plan_above(model, 600)
    assert recomputed(model) == before


def test_the_model_and_its_training_stay_as_they_are():
    """Compiled for the CPU that is here, without the search."""
    run, other = make_model(), make_model()
    for model in (run, other):
        model.fit(X, X, verbose=0)
    first = backend.planned_step(run, X, X)
    assert first == backend.planned_step(run, X, X)
    assert first.operations > 0
    for model in (run, other):
        model.fit(X, X, verbose=0)
    for a, b in zip(run.variables, other.variables, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("head", [None, "float32"])
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("float32", {"slot_dtype": "int8"}),
        ("mixed_bfloat16", {"slot_dtype": "int8"}),
        ("bfloat16", {"slot_dtype": "int8", "master_weights": 24}),
    ],
)
def test_what_the_advice_on_slots_promises_is_what_they_take(policy, options, head):
    """Followed: weights and slots take as many bytes as the plan says, also where some of them are
    in float32."""
    from kmp.debug.budget import _state
    from kmp.debug.memory import in_half, state_bytes
    from kmp.half_memory import HalfMemory

    def made(policy, **options):
        keras.config.set_dtype_policy(policy)
        blocks = [keras.layers.Dense(64), keras.layers.Dense(512, dtype=head)]
        model = keras.Sequential([keras.Input((16,)), *blocks])
        keras.config.set_dtype_policy("float32")
        model.compile(kmp.scaled("adam", **options), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    def held(model):
        kept = [*model.variables, *model.optimizer.inner_optimizer.variables]
        return sum(v.value.nbytes for v in kept)

    promised = _state(made(policy), HalfMemory(**options))
    assert abs(held(made(policy, **options)) - promised) < 100  # counters and a learning rate
    if policy == "mixed_bfloat16":  # and where the advice is another policy
        model = made(policy)
        promised = state_bytes(model, in_half(model), HalfMemory(**options))
        assert abs(held(made("bfloat16", **options)) - promised) < 100


@pytest.mark.parametrize(
    "budget", ["", "24", "GB", "1.2.3 GB", ".", 0, -1, float("nan"), None, "2 PB"]
)
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ValueError, match=r'Write budget="24 GB"'):
        plan_of(make_model(1), budget)


@pytest.mark.parametrize(
    ("budget", "number"), [("24 GB", 24e9), ("1.5MiB", 1.5 * 2**20), (5e6, 5e6), (" 2 kB", None)]
)
def test_budgets(planned, budget, number):
    if number is None:
        with pytest.raises(ValueError, match="budget"):
            plan_of(make_model(1), budget)
    else:
        assert plan_of(make_model(1), budget).budget == number


@pytest.mark.parametrize("device", [None, "cpu", "rtx"])
def test_cpus_and_unknown_devices_are_refused(device):
    with pytest.raises(ValueError, match=r"device.*h100"):
        kmp.debug.memory_plan(make_model(1), X, X, "1 GB", device=device)


def test_older_keras_is_refused(monkeypatch):
    name = "_record_training_state_sharding_spec"
    monkeypatch.setattr(keras.Model, name, lambda model: None, raising=False)
    with pytest.raises(NotImplementedError, match="Received: Keras 3"):
        plan_of(make_model(1), 1e9)


def test_a_model_must_be_compiled():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="compiled"):
        plan_of(model, 1e9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "compiler", "budget"),
    [("v5e", "libtpu", "150 MB"), ("h100", "jax_cuda12_plugin", "450 MB")],
)
def test_on_a_device_that_is_not_here(device, compiler, budget):
    """XLA's own: the plan is within the budget, and one block less is not."""
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs {compiler}")
    # Compilers for TPUs take three times as long for gelu.
    model = make_model(blocks=4, width=64, activation="tanh")
    x, y = keras.KerasTensor((2**16, 16)), keras.KerasTensor((2**16, 64))
    plan = kmp.debug.memory_plan(model, x, y, budget, device=device)
    assert plan.steps[0].bytes > 2 * plan.budget
    assert plan.fits and 0 < plan.step.blocks < 4 and plan.step.operations > 1
    assert not any(recomputed(model))

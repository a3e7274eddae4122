"""Every script in examples/ runs, and shows what it says that it shows."""

import contextlib
import io
import os
import pathlib
import re
import runpy
import subprocess
import sys
import warnings

import pytest
from conftest import BACKEND

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}

# Lines that each must print with --smoke; a script that is not named here must still end well.
# Whether the optimizer knows that the loss itself was not finite, and leaves the scale alone then.
CUSTOM_LOOP_SCALE = 32768 if BACKEND == "jax" else 131072
EXPECTED = {
    "quickstart.py": [
        r"^Gradient health after step \d+: loss scale \d+",
        r"^Curves: tensorboard --logdir logs$",
        rf"^Test accuracy \d+\.\d% after \d+ s on {BACKEND}\.\n\Z",
    ],
    "other_trackers.py": [
        r"^   10 +32768 +0 +\d\.\d{3} +\d\.\d{3}  HEALTHY$",
        r"^3 reports of \d\d numbers: logs/other_trackers/reports\.jsonl$",
    ],
    "find_the_nan.py": [
        r"^In mixed float16 the loss is not finite at batch 2\.$",
        r"^FORWARD: classifier/energy \(float16\)$",
        r"^  cause: finite in float32 .*: it left float16 \(at most 65504\)",
        r"^mixed_float16 everywhere but for classifier/energy: output SQNR",
        r"^Under the map the first loss that is not finite: None; skipped steps: 0\.$",
    ],
    "lora.py": [
        r"^sequential\S*/hidden_0 .*float32 weights: LoRA's adapters",
        r"^HEALTHY: loss scale 1, 0 skipped\.$",
        r"^Weights and slots: 248 KiB; all of it in float32: 990 KiB$",
        r"^Adapters on a bfloat16 base: mirrored digits 9\d\.\d%$",
        r"^Merged, saved and loaded: 9\d\.\d%, on \w+\.$",
    ],
    "memory_plan.py": [
        r"^mixed_bfloat16, here, 0\.2 million parameters: held 1\.98 MB, in a step ",
        r"^bfloat16, here, 0\.2 million parameters: held 1\.00 MB, in a step ",
    ],
    "finetune_language_model.py": [
        r"^HEALTHY: loss scale 1, 0 skipped\.$",
        r"^lora: 16,640 of 115,264 parameters trained$",
    ],
    "finetune_on_a_tpu.py": [
        r"^HEALTHY: loss scale 1, 0 skipped\.$",
        r"^half: (\d+,\d+) of \1 parameters trained$",
    ],
    "float16_on_a_t4.py": [
        r"^mixed_float16: 4\d tokens, of which 4\d are padding$",
        r"^mixed_float16 everywhere but for decoder_block_1: output SQNR ",
    ],
    "gan.py": [
        r"^critic: loss \d\.\d+, loss scale \d+, 1 of 56 steps skipped$",
        r"^artist: loss \d\.\d+, loss scale 32768, 0 of 56 steps skipped$",
    ],
    "diffusion.py": [r"^HEALTHY: loss scale 32768, 0 skipped\.$"],
    "keep_one_layer_in_float32.py": [
        r"^Costs the output most: contrast,",
        r"^mixed_bfloat16 everywhere but for contrast: output SQNR",
    ],
    "quantization_aware.py": [r"^seed 0 "],
    "when_float16_fails.py": [r"^Underflow: ", r"^Overflow: "],
    "survive_a_bad_batch.py": [rf"^Rollbacks: [123] on {BACKEND}\.$"],
    "full_recipe.py": [
        r"^Killed in the second epoch\.$",
        r"^Resuming from logs/full_recipe/backup; best validation loss so far \d",
        r"^epoch  2: .*\n^epoch  3: ",  # and not the first again
        r"^HEALTHY: loss scale 32768, 0 skipped\.$",
        r"^averaged weights +\d+\.\d\d bits a character$",
        r"^best checkpoint, update 6 +\d+\.\d\d bits a character$",
    ],
    "gradient_checkpointing.py": [
        r"^mixed_float16 +yes .*the same within (0\.0e\+00|\d\.\de-(0[4-9]|1\d))$"
    ],
    "schedules.py": [
        r"^step \(MultiStepLR\) +1\.000 1\.000 1\.000 0\.000 0\.000 1\.000 0\.100 0\.100$",
        r"^Steps \(3, 4\) were skipped; no schedule advanced on them\.$",
    ],
    "lr_finder.py": [
        r"^Suggestion 0\.0\d+ after \d\d points; the loss diverged after",
        r"^Weights as they were: True\. Curve: learning_rates\.png",
        r"^suggested .*: test accuracy (8|9)\d\.\d%$",
        rf"^On {BACKEND}\.$",
    ],
    "bfloat16_tpu.py": [
        rf"^mixed_bfloat16 +test accuracy [789]\d\.\d%, 0 steps skipped on {BACKEND}$",
        r"^On a TPU: ",
    ],
    "convert_a_model.py": [
        r"^digits/conv +Conv2D +float32 +mixed_float16 *$",
        r"^digits/head +Dense +float32 +float32 +output layer$",
        rf"^Steps skipped since the conversion: 0, on {BACKEND}\.$",
    ],
    "custom_loop.py": [
        rf"^Gradient health after step 56: loss scale {CUSTOM_LOOP_SCALE}, 2 skipped",
        r"^Largest difference from the weights of fit: 0\.0$",
        r"^Loss from \d+\.\d+ to \d+\.\d+; not finite in 2 steps\.$",
        rf"^ loop: loss scale {CUSTOM_LOOP_SCALE}, 2 of 56 steps skipped, 54 applied$",
        rf"^  fit: loss scale {CUSTOM_LOOP_SCALE}, 2 of 56 steps skipped, 54 applied$",
    ],
    "several_hosts.py": {
        "tensorflow": [r"^On tensorflow Keras \S+ has no fit of several processes\.$"],
        "jax": [r"^Process 0 of 1 begins with epoch 1\.$", r"^Process 0 of 1: HEALTHY: loss scale"],
        "torch": [r"^Process 0 of 1: HEALTHY|has no fit of several processes\.$"],
    },
    "distributed.py": {
        "tensorflow": [
            r"^After a batch with inf on the last replica: weights moved: False$",
            r"^After an epoch more: weights finite: True, training loss \d",
            r"^Replicas: 2, all with the same weights: True$",
            r"^Loss scale on each: \[32768\.0, 32768\.0\], skipped steps: \[1, 1\]$",
        ],
        "jax": [
            r"^After a batch with inf on the last replica: weights moved: False$",
            r"^After an epoch more: weights finite: True, training loss \d",
            r"^Replicas: 4, all with the same weights: True$",
            r"^Loss scale on each: \[(16384\.0(, )?){4}\], skipped steps: \[1, 1, 1, 1\]$",
        ],
        "torch": [r"^On torch, .*torch\.distributed.*DistributedDataParallel"],
    },
}


# They train a dozen models, whose compiling takes most of a minute where steps are compiled.
ON_TORCH_ALONE = {"quantization_aware.py", "when_float16_fails.py"}

# It runs a model under one policy after another, each of which JAX compiles operation by operation.
NOT_ON_JAX = {"keep_one_layer_in_float32.py"}

# On others they print that they need JAX.
ON_JAX_ALONE = {"memory_plan.py", "finetune_on_a_tpu.py"}

# Those that make devices, and settings of the process, of their own.
IN_A_PROCESS_OF_THEIR_OWN = {
    "distributed.py",
    "several_hosts.py",
    "bfloat16_tpu.py",
    "memory_plan.py",
    "finetune_on_a_tpu.py",
}

# On TensorFlow their notebooks run, which have all of their code; see test_notebooks.py.
RECIPES = runpy.run_path(str(ROOT / "notebooks" / "from_examples.py"))["RECIPES"]

# `make programs` runs them; keras-hub warns of what it does itself.
WITH_KERAS_HUB = {"finetune_language_model.py", "finetune_on_a_tpu.py", "float16_on_a_t4.py"}


def run_here(script, monkeypatch, directory):
    """What the script prints with --smoke in this process, without importing everything again."""
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(ROOT / "examples")  # as for a script: they import each other
    monkeypatch.setattr(sys, "argv", [script, "--smoke"])
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.simplefilter("default")  # a script may warn; what it shows is printed
        runpy.run_path(str(SCRIPTS[script]), run_name="__main__")
    return printed.getvalue()


def run(script, directory, *arguments, timeout=300):
    """What the script prints, on this backend and with the devices that it makes itself."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment.update(KERAS_BACKEND=BACKEND, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, SCRIPTS[script], *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_script_is_in_the_readme_and_no_other():
    readme = (ROOT / "examples" / "README.md").read_text()
    assert set(re.findall(r"\[`(\w+\.py)`\]", readme)) == set(SCRIPTS) >= set(EXPECTED)


def rows(printed, title):
    """The table under `title`: {run: (lost gradients, final loss, weights, skipped, scale)}."""
    table = {}
    for line in printed[printed.index(title) :].splitlines()[2:5]:
        name, lost, loss, weights, skipped, scale = re.split(r"\s{2,}", line.strip())
        assert lost.endswith("%")
        table[name] = (float(lost[:-1]), float(loss), weights, int(skipped), float(scale))
    return table


def check_that_kmp_keeps_the_gradients_that_plain_float16_loses(printed):
    table = rows(printed, "Underflow: ")
    reference, plain, scaled = (table[k] for k in ("float32", "plain float16", "kmp float16"))
    # All but the image's bias becomes zero in float16: the sizes of the layers say how many.
    image, decoder, bias = 64 * 64 + 64, 64 * 64 + 64, 64
    assert plain[0] == pytest.approx(100 * (1 - bias / (image + decoder)), abs=0.05)
    # Of gradients of 1e-9 times the first scale of 2**15 a few are below 6e-8 still.
    assert reference[0] <= scaled[0] <= reference[0] + 1.0
    # Images of numbers in [0, 1]: a decoder that stands still draws grey.
    assert plain[1] > 3 * reference[1]
    assert scaled[1] == pytest.approx(reference[1], rel=0.05)
    assert reference[2] == plain[2] == scaled[2] == "finite"
    assert scaled[4] > 2**15


def check_that_kmp_backs_off_where_plain_float16_turns_to_nan(printed):
    table = rows(printed, "Overflow: ")
    reference, plain, scaled = (table[k] for k in ("float32", "plain float16", "kmp float16"))
    assert plain[0] > 0 == reference[0] == scaled[0]
    assert plain[1] != plain[1]
    assert plain[2] == "NaN"
    assert scaled[2] == reference[2] == "finite"
    # At 104 steps, of which kmp has used up 20 on finding its scale; and the data's variance.
    assert scaled[1] == pytest.approx(reference[1], rel=0.25)
    assert scaled[1] < 5930
    # From 2**15 down by half for each skipped step, to below 1.
    assert scaled[4] == 2.0 ** (15 - scaled[3]) < 1


def check_that_the_guard_saves_a_poisoned_run(printed):
    names = ("clean batches", "5 bad batches", "5 bad batches, with the guard")
    clean, ruined, guarded = (
        float(re.search(rf"^{name} +(\d+\.\d)%", printed, re.MULTILINE)[1]) for name in names
    )
    assert clean >= 95.0
    assert ruined <= 30.0  # chance is 10
    assert guarded >= clean - 2.0


def check_that_one_float32_layer_restores_the_accuracy(printed):
    found = re.findall(r"^Test accuracy in (.*): (\d\.\d+)$", printed, re.MULTILINE)
    reference, ruined, cured = (float(value) for _, value in found)
    assert reference > 0.8
    assert ruined < reference - 0.15
    # The noise that is left, 30 dB below the logits, moves a few of 389 images either way.
    assert cured == pytest.approx(reference, abs=0.02)


def check_that_training_for_few_bits_wins_back_what_they_cost(printed):
    numbers = re.search(r"^seed 0 +(.*)$", printed, re.MULTILINE)[1]
    reference, after, aware = map(float, numbers.split())
    assert reference > 95
    assert reference > aware > after + 5.0


def check_that_checkpointing_keeps_a_fraction(printed):
    kept = [float(x) for x in re.findall(r"(\d+\.\d+) MiB", printed)]
    assert len(kept) == 2 and kept[1] < kept[0] / 4


def check_that_conversion_costs_nothing(printed):
    before, after, later = (float(x) for x in re.findall(r"test accuracy (\d+\.\d)%", printed))
    assert before > 90 and after >= before - 1.0 and later >= before - 2.0


def numbers_of(pattern, printed):
    """The numbers in the groups of the line that a pattern finds."""
    found = re.search(pattern, printed, re.MULTILINE)
    return [float(x.replace(",", "")) for x in found.groups()]


def check_that_fine_tuning_lowers_the_loss(printed):
    before, after = numbers_of(r"^Loss (\S+) before, (\S+) after", printed)
    assert after < before - 0.05


def check_that_each_device_holds_an_eighth(printed):
    """But for the weights of normalizations, which are not split."""
    first, whole = numbers_of(r"^The first of 8 devices holds (\S+) of (\S+) bytes", printed)
    assert whole / 8 <= first < whole / 7


def check_that_float16_is_blank_and_the_map_is_not(printed):
    tokens, padding = numbers_of(r"^mixed_float16: (\d+) .* (\d+) are padding", printed)
    assert padding == tokens > 0
    same, of = numbers_of(r"^(\d+) of (\d+) tokens", printed)
    # Of two words that are as good as equally likely float16 may take the other one.
    assert of == tokens and same > 0.9 * of


def check_that_images_come_closer(printed):
    """To the real ones, than what it began with."""
    far, near = numbers_of(r"^Distance from the real images: (\S+) \D*, (\S+) ", printed)
    assert near < 0.8 * far


def check_what_is_printed(script, printed):
    expected = EXPECTED.get(script, [])
    for line in expected[BACKEND] if isinstance(expected, dict) else expected:
        assert re.search(line, printed, re.MULTILINE), f"{line}\n---\n{printed}"
    if script == "gradient_checkpointing.py" and BACKEND != "tensorflow":
        check_that_checkpointing_keeps_a_fraction(printed)
    if script in ("finetune_language_model.py", "finetune_on_a_tpu.py"):
        check_that_fine_tuning_lowers_the_loss(printed)
    if script == "finetune_on_a_tpu.py":
        check_that_each_device_holds_an_eighth(printed)
    if script == "float16_on_a_t4.py":
        check_that_float16_is_blank_and_the_map_is_not(printed)
    if script in ("gan.py", "diffusion.py"):
        check_that_images_come_closer(printed)
    if script == "convert_a_model.py":
        check_that_conversion_costs_nothing(printed)
    if script == "survive_a_bad_batch.py":
        check_that_the_guard_saves_a_poisoned_run(printed)
    if script == "keep_one_layer_in_float32.py":
        check_that_one_float32_layer_restores_the_accuracy(printed)
    if script == "quantization_aware.py":
        check_that_training_for_few_bits_wins_back_what_they_cost(printed)
    if script == "when_float16_fails.py":
        check_that_kmp_keeps_the_gradients_that_plain_float16_loses(printed)
        check_that_kmp_backs_off_where_plain_float16_turns_to_nan(printed)


def backends_of(script):
    if script in ON_JAX_ALONE:
        return ["jax"]
    if script.removesuffix(".py") in RECIPES:
        return ["jax", "torch"]
    if script in ON_TORCH_ALONE:
        return ["torch"]
    return ["tensorflow", "torch"] if script in NOT_ON_JAX else ["tensorflow", "jax", "torch"]


@pytest.mark.parametrize(
    "script", [pytest.param(x, marks=pytest.mark.only(*backends_of(x))) for x in SCRIPTS]
)
def test_a_script_ends_well_and_shows_what_it_should(script, tmp_path, monkeypatch):
    if script in WITH_KERAS_HUB:
        pytest.importorskip("keras_hub")
    if script in IN_A_PROCESS_OF_THEIR_OWN:
        printed = run(script, tmp_path, "--smoke")
    else:
        printed = run_here(script, monkeypatch, tmp_path)
    check_what_is_printed(script, printed)


def make_preset(folder, monkeypatch):
    """A folder as a preset of keras-hub is: the tiny model, and a tokenizer of 256 pieces."""
    keras_hub = pytest.importorskip("keras_hub")
    sentencepiece = pytest.importorskip("sentencepiece")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import finetune_language_model

    model, special = io.BytesIO(), ("pad", "eos", "bos", "unk")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((ROOT / "README.md").read_text().splitlines()),
        model_writer=model,
        vocab_size=256,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
        minloglevel=2,
        **{f"{name}_id": i for i, name in enumerate(special)},
        **{f"{name}_piece": f"<{name}>" for name in special},
    )
    tokenizer = keras_hub.models.GemmaTokenizer(proto=model.getvalue())
    keras_hub.models.GemmaCausalLM(
        finetune_language_model.build_backbone("tiny", "float32"),
        keras_hub.models.GemmaCausalLMPreprocessor(tokenizer),
    ).save_to_preset(str(folder))


@pytest.mark.only("tensorflow", "jax", "torch")
@pytest.mark.filterwarnings("ignore")
def test_a_script_works_with_a_preset(tmp_path, monkeypatch):
    """One is trained whole and saved; what was saved is a preset, which float16 answers with."""
    make_preset(tmp_path / "tiny", monkeypatch)
    options = ["--text", str(ROOT / "README.md"), "--length", "64", "--rate", "0.001"]
    for method, folder in (("lora", "adapters"), ("full", "whole")):
        printed = run(
            *("finetune_language_model.py", tmp_path, "--preset", "tiny", "--method", method),
            *(*options, "--save", folder),
        )
        before, after = numbers_of(r"^Loss (\S+) before, (\S+) after", printed)
        assert after < before  # weights at random learn slowly
    assert (tmp_path / "adapters" / "adapters.lora.h5").exists()
    printed = run("float16_on_a_t4.py", tmp_path, "--preset", "whole", "--prompt", "The loss")
    assert re.search(r"^(\d+) of \1 tokens are those of float32", printed, re.MULTILINE), printed


@pytest.mark.only("tensorflow")
def test_the_quickstart_reaches_its_accuracy(tmp_path):
    """In full, as `make quickstart` runs it; the other backends run it with --smoke."""
    printed = run("quickstart.py", tmp_path, timeout=600)
    accuracy = re.search(r"^Test accuracy (\d+\.\d)%", printed, re.MULTILINE)
    assert float(accuracy[1]) >= 97.0
    assert list((tmp_path / "logs" / "quickstart").iterdir())


@pytest.mark.only("jax")
@pytest.mark.parametrize("method", ["lora", "full", "half", "mixed"])
def test_a_plan_counts_what_a_run_holds(method, tmp_path):
    """XLA's bytes of the arguments are those of the weights and slots that a run has made."""
    pytest.importorskip("keras_hub")
    name = "finetune_language_model.py"
    made = run(name, tmp_path, "--smoke", "--method", method)
    planned = run(name, tmp_path, "--method", method, "--plan", "here")
    held = int(
        re.search(r"^Weights and slots: (\S+) bytes", made, re.MULTILINE)[1].replace(",", "")
    )
    held += 4 * 4 * 64 * 4 + 8  # four arrays of a batch of 4 sequences of 64; the mean of the loss
    (found,) = numbers_of(r": held (\S+) MB", planned)
    assert found == pytest.approx(held / 1e6, abs=0.005)  # it prints two places

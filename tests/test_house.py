"""The house rules that a test can hold: rooms, floors, short functions, and the two walls."""

import ast
import os
import pathlib
import re
import subprocess
import sys
from collections import defaultdict

import keras
import pytest
from oracle import BACKEND

import kmp
from kmp._keras import versions

pytestmark = pytest.mark.any_backend

ROOT = pathlib.Path(kmp.__file__).parent
BACKENDS = ("tensorflow", "jax", "torch")

# From the ground up; a room may import what stands on a lower floor.
FLOORS = [
    ["_backend", "_common", "_keras", "summaries"],
    ["precision", "health"],
    ["half_memory", "int8", "layers"],
    ["scaling"],
    ["models", "callbacks", "debug"],
    ["__init__", "cli"],
    ["__main__"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}


def room_of_file(name):
    return name.split("/")[0].removesuffix(".py")


ROOMS = {room_of_file(name) for name in SOURCES}


def test_at_most_14_rooms_on_7_floors():
    rooms = [path.name for path in ROOT.iterdir() if not path.name.startswith("__")]
    assert len(set(rooms) - {"py.typed"}) <= 14, sorted(rooms)
    assert len(FLOORS) <= 7
    assert set(FLOOR) == ROOMS, "FLOORS names each room, and no other"


# Short functions

MAX_FUNCTION = 50  # lines


def long_functions(tree):
    """The functions with more than 50 lines, without their docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= docstring.end_lineno - docstring.lineno + 1
            if lines > MAX_FUNCTION:
                yield f"{node.name}: {lines} lines"


def test_no_function_is_too_long():
    found = {name: set(long_functions(tree)) for name, tree in TREES.items()}
    assert {name: functions for name, functions in found.items() if functions} == {}


@pytest.mark.parametrize("lines, found", [(49, []), (50, ["f: 51 lines"])])
def test_long_functions_are_found(lines, found):
    body = '    """One.\n\n    Two.\n    """\n' + "    pass\n" * lines
    assert list(long_functions(ast.parse(f"def f():\n{body}"))) == found


# Imports point downwards


def imported(tree):
    """Every absolute name that a source imports, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(name):
    """The room of kmp that an imported name belongs to, or None."""
    package, _, rest = f"{name}.".partition(".")
    if package != "kmp":
        return None
    room = rest.split(".")[0]
    return room if room in ROOMS else "__init__"


def upward_imports(room, tree):
    targets = {room_of(name) for name in imported(tree)} - {None, room}
    return sorted(target for target in targets if FLOOR[target] >= FLOOR[room])


def test_imports_point_downwards():
    found = {name: upward_imports(room_of_file(name), tree) for name, tree in TREES.items()}
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


@pytest.mark.parametrize(
    "room, source, expected",
    [
        ("health", "from kmp.scaling.optimizer import scaled", ["scaling"]),
        ("health", "def f():\n    import kmp.precision", ["precision"]),
        ("precision", "from kmp import health, _backend", ["health"]),
        ("health", "import kmp", ["__init__"]),
        ("scaling", "from kmp import scaled", ["__init__"]),
        ("scaling", "from kmp.health.telemetry import due", []),
        ("callbacks", "from kmp.callbacks.watcher import Cadence", []),
    ],
)
def test_upward_imports_are_found(room, source, expected):
    assert upward_imports(room, ast.parse(source)) == expected


# The first wall: only _backend names TensorFlow, JAX and torch


def backend_imports(tree):
    return sorted({name.split(".")[0] for name in imported(tree)} & set(BACKENDS))


def test_one_place_names_the_backends():
    found = {name: backend_imports(tree) for name, tree in TREES.items()}
    assert {x: y for x, y in found.items() if y and room_of_file(x) != "_backend"} == {}


@pytest.mark.parametrize(
    "source, expected",
    [
        ("import jax.numpy as jnp", ["jax"]),
        ("def f():\n    from tensorflow import io\n    import torch", ["tensorflow", "torch"]),
        ("import keras, jaxtyping", []),
    ],
)
def test_backend_imports_are_found(source, expected):
    assert backend_imports(ast.parse(source)) == expected


# The second wall: only _keras/ and _backend/ touch what is private to Keras

NAMEDTUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public in spite of their underscore


def is_private(name):
    return name.startswith("_") and name != "_" and not name.endswith("__")


def defined(tree):
    """The private names that a source defines: functions, classes, variables, own attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr if ast.unparse(node.value) == "self" else ""
        else:
            continue
        if is_private(name):
            yield name


def touched(tree):
    """The private attributes that a source reads, sets or deletes, and `keras.src`."""
    if any(f"{name}.".startswith("keras.src.") for name in imported(tree)):
        yield "keras.src"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node) == "keras.src":
                yield "keras.src"
            elif is_private(node.attr) and ast.unparse(node.value) != "kmp":
                yield node.attr
        elif isinstance(node, ast.Constant) and str(node.value).startswith("keras.src"):
            yield "keras.src"
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if isinstance(node.slice.value, str) and is_private(node.slice.value):
                yield node.slice.value
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            by_name = ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr")
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if by_name and isinstance(name, str) and is_private(name):
                yield name


def foreign(tree, own):
    return set(touched(tree)) - own - NAMEDTUPLE


OWN = defaultdict(set)  # a room's private names are its own; another room's are foreign too
for _name, _tree in TREES.items():
    OWN[room_of_file(_name)] |= set(defined(_tree))


def test_one_place_touches_what_is_private_to_keras():
    """Use a public name; if there is none, write a function in kmp/_keras/."""
    found = {
        name: foreign(tree, OWN[room_of_file(name)])
        for name, tree in TREES.items()
        if room_of_file(name) not in ("_keras", "_backend")
    }
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source, expected",
    [
        ("x = layer._flatten_layers()", {"_flatten_layers"}),
        ("layer._dtype_policy = None", {"_dtype_policy"}),
        ("class A(keras.Layer):\n    def f(self):\n        return self._losses", {"_losses"}),
        ("x = getattr(layer, '_called', False)", {"_called"}),
        ("x = vars(optimizer)['_learning_rate']", {"_learning_rate"}),
        ("x = module.startswith('keras.src.backend.')", {"keras.src"}),
        ("from keras.src.backend.common import masking", {"keras.src"}),
        ("x = keras.src.backend.AutocastScope(None)", {"keras.src"}),
        ("class A:\n    def f(self):\n        self._mine = 1\n        return other._mine", set()),
        ("x = row._asdict(), y.__dict__, kmp._backend.backend.platform()", set()),
    ],
)
def test_private_names_of_others_are_found(source, expected):
    tree = ast.parse(source)
    assert foreign(tree, set(defined(tree))) == expected


# The private names of Keras that stand behind the wall, by the oldest release that has them: 3.10.0
# to 3.15.1 were looked through, and 3.9.2, which has all of the first group but one.
PRIVATE = {
    "3.10.0": """
        AutocastScope Functional compute_output_spec get_global_attribute get_keras_mask
        global_state in_stateless_scope in_symbolic_scope seed_generator set_keras_mask
        to_snake_case
        _call_has_context_arg _call_has_training_arg _call_signature _called _dtype_policy
        _flatten_layers _functional _inbound_nodes _is_default _is_quantized _keras_history
        _kernel _loss_ids _losses _nodes_by_depth _non_trainable_variables _run_through_graph
        _track_variables _tracker _trainable_variables
        _untrack_variable
        _compile_config _compile_loss _compile_metrics _distribute_strategy _jax_state
        _jax_state_synced _loss_tracker
        _symbolic_build _user_loss _user_loss_weights
        _accumulated_gradients _all_reduce_sum_gradients _apply_weight_decay
        _backend_apply_gradients _backend_increment_gradient_accumulators
        _backend_reset_gradient_accumulators _backend_update_step _clip_gradients
        _get_current_learning_rate _get_variable_index _iterations _learning_rate
        _model_variables_moving_average
        _overwrite_model_variables_with_average_value _trainable_variables_indices
        _update_model_variables_moving_average _var_key _variables
        BaseOptimizer KerasVariable _exclude_from_weight_decay _layout _parallel_update_step
        _direct_assign _dtype _exclude_from_weight_decay_pattern _fn _initialize
        _autocast _maybe_autocast _use_weight_decay
    """,
    "3.15.0": "_optimizer_map",
}
# What a later release no longer has, by that release. Each name stands in one of the two tables:
# after a rename the new one above, by the release that brought it, and the old one here.
GONE = {"3.12.0": "_record_training_state_sharding_spec"}
# Of TensorFlow, of PyTorch, and of kmp itself.
NOT_OF_KERAS = {
    *("_rng", "_C", "_are_functorch_transforms_active", "_foreach_copy_", "_foreach_mul"),
    *("_foreach_norm", "_base", "_create_op_internal", "_get_function", "_has_action"),
}


def names_in_keras_src(tree):
    """The last part of each name in `keras.src` that a source imports or reads."""
    names = [*imported(tree), *map(ast.unparse, ast.walk(tree))]
    for name in names:
        if re.fullmatch(r"keras\.src\.[\w.]+", name) and name != "keras.src.backend":
            yield name.rpartition(".")[2]


def test_each_private_name_is_listed_with_the_keras_it_was_checked_on():
    behind = {x: t for x, t in TREES.items() if room_of_file(x) in ("_keras", "_backend")}
    used = {name for tree in behind.values() for name in names_in_keras_src(tree)}
    used |= {name for x, t in behind.items() for name in foreign(t, OWN[room_of_file(x)])}
    listed = [name for names in [*PRIVATE.values(), *GONE.values()] for name in names.split()]
    assert used - {"keras.src"} - NOT_OF_KERAS == set(listed)
    assert len(listed) == len(set(listed))


def test_this_keras_has_each_private_name():
    words = set()
    for path in pathlib.Path(keras.__file__).parent.rglob("*.py"):
        words |= set(re.findall(r"\w+", path.read_text()))
    here = versions.release(keras.__version__)

    def until_here(table):
        reached = [names for since, names in table.items() if versions.release(since) <= here]
        return {name for names in reached for name in names.split()}

    has, lacks = until_here(PRIVATE), until_here(GONE)
    assert (has - words, lacks & words) == (set(), set())


# Each backend overrides what `Backend` declares, and nothing else


def methods_of(tree, is_wanted):
    """The public methods of the classes that are wanted, and the names of their arguments."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and is_wanted(node):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not is_private(member.name):
                    every = [*member.args.args, member.args.vararg, *member.args.kwonlyargs]
                    yield member.name, [x.arg for x in every if x is not None]


def is_backend(node):
    return any(ast.unparse(base) == "Backend" for base in node.bases)


DECLARED = dict(methods_of(TREES["_backend/base.py"], lambda node: node.name == "Backend"))


def not_declared(tree):
    """mypy reports an override of another signature, but not a name that it has never seen."""
    found = methods_of(tree, is_backend)
    return {name for name, arguments in found if DECLARED.get(name) != arguments}


def test_backends_only_override():
    found = {name: dict(methods_of(tree, is_backend)) for name, tree in TREES.items()}
    assert len([name for name, overrides in found.items() if overrides]) == len(BACKENDS)
    assert {name: x for name, tree in TREES.items() if (x := not_declared(tree))} == {}


@pytest.mark.parametrize(
    "method, expected",
    [
        ("def hash_bits(self, x): return x", set()),
        ("def hash_bitz(self, x): return x", {"hash_bitz"}),
        ("def hash_bits(self, bits): return bits", {"hash_bits"}),
        ("def _own(self): pass", set()),
    ],
)
def test_methods_that_override_nothing_are_found(method, expected):
    assert not_declared(ast.parse(f"class TpuBackend(Backend):\n    {method}")) == expected


# Keras's classes are bound when kmp is imported: a program may put others under their names


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def looked_up_late(tree, within=False):
    """The classes of Keras that a function looks up when it runs, except to make an instance."""
    for field, value in ast.iter_fields(tree):
        inside = within or (field == "body" and isinstance(tree, FUNCTIONS))
        makes_one = field == "func" and isinstance(tree, ast.Call)
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or field in ("annotation", "returns"):
                continue
            if re.fullmatch(r"keras(\.\w+)*\.[A-Z]\w*", ast.unparse(node)):
                if inside and not makes_one:
                    yield ast.unparse(node)
            else:
                yield from looked_up_late(node, inside)


def test_classes_of_keras_are_bound_at_import():
    """Write `from keras.layers import Dense`, and `isinstance(layer, Dense)`."""
    found = {name: set(looked_up_late(tree)) for name, tree in TREES.items()}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source, expected",
    [
        ("def f(x):\n    return isinstance(x, keras.layers.Dense)", {"keras.layers.Dense"}),
        ("class A:\n    def f(self):\n        super(keras.Layer, self).f()", {"keras.Layer"}),
        ("def f(x):\n    return type(x).call is keras.Model.call", {"keras.Model"}),
        ("f = lambda x: isinstance(x, keras.Model)", {"keras.Model"}),
        ("def f(x: keras.Model) -> keras.Layer:\n    y: keras.Layer = x", set()),
        ("class A(keras.Layer):\n    pass", set()),
        ("def f():\n    return keras.layers.Dense(1), keras.backend.backend()", set()),
    ],
)
def test_late_names_of_classes_are_found(source, expected):
    assert set(looked_up_late(ast.parse(source))) == expected


# What importing loads


WATCH = """
import sys

def loaded():
    print([x for x in ("tensorflow", "jax", "torch") if x in sys.modules])

import keras
loaded()
import kmp
loaded()
import torch
loaded()
"""


@pytest.mark.slow
@pytest.mark.only(*BACKENDS)
def test_importing_kmp_loads_no_other_backend():
    """Keras itself loads JAX on each backend, and no other."""
    done = subprocess.run(
        [sys.executable, "-c", WATCH],
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    by_keras, by_kmp, at_the_end = map(ast.literal_eval, done.stdout.splitlines()[-3:])
    assert by_kmp == by_keras
    assert set(by_kmp) == {BACKEND, "jax"}
    assert "torch" in at_the_end  # it would have been noticed

"""What may be read or written in either order, in the graphs that TensorFlow executes."""

import collections
import re

# Operations that hold functions, which may assign the variables that they are given.
_CALLS = ("If", "While", "Case", "StatefulPartitionedCall")


def optimized_graphs(run):
    """The graphs of all functions in `run`, after Grappler. Private: TensorFlow's context."""
    from tensorflow.python.eager import context

    context.context().enable_graph_collection()
    try:
        run()
        functions = context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_graph_collection()
    return [each.post_optimization_graph for each in functions]


def unordered(graph):
    """How many pairs of a write and another use of its variable there are, and those without order.

    Args:
        graph: a GraphDef.
    """
    nodes = {node.name: node for node in graph.node}
    inputs = {n: [x.lstrip("^").split(":")[0] for x in nodes[n].input] for n in nodes}
    uses = collections.defaultdict(list)
    for name, node in nodes.items():
        if node.op in ("Identity", "IdentityN", "Switch", "Enter", "NoOp", "_Retval"):
            continue
        for x in node.input:
            if not x.startswith("^") and (variable := _variable(x, nodes)):
                uses[variable].append(name)
    pairs = [
        (x, y)
        for names in uses.values()
        for i, x in enumerate(names)
        for y in names[:i]
        if (_writes(nodes[x].op) or _writes(nodes[y].op)) and not _exclusive(x, y)
    ]
    before = {name: _before(name, inputs) for pair in pairs for name in pair}
    return len(pairs), [(x, y) for x, y in pairs if x not in before[y] and y not in before[x]]


def _variable(name, nodes):
    """The name of the handle that a tensor is, or None."""
    node = nodes[name.split(":")[0]]
    while node.op in ("Identity", "Switch", "Enter"):
        node = nodes[node.input[0].split(":")[0]]
    resource = 20  # TensorFlow's number of the dtype
    return node.name if resource in (node.attr["T"].type, node.attr["dtype"].type) else None


def _writes(op):
    assigns = op.startswith(("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter"))
    return assigns or op in _CALLS


def _exclusive(x, y):
    """Whether two operations stand in the two branches of one condition."""
    parts = [re.sub(r"_\d+/", "/", name).split("/") for name in (x, y)]
    first = next((pair for pair in zip(*parts, strict=False) if pair[0] != pair[1]), ())
    return set(first) == {"then", "else"}


def _before(name, inputs):
    found, left = set(), [name]
    while left:
        new = set(inputs[left.pop()]) - found
        found |= new
        left += new
    return found

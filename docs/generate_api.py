"""Write docs/api.md from the docstrings: `python docs/generate_api.py`."""

import inspect
import pathlib
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import kmp
import kmp.summaries

PAGE = pathlib.Path(__file__).with_name("api.md")
# What each public module offers; those without an `__all__` say here what is meant for users.
MODULES: dict[ModuleType, list[str]] = {
    kmp: [name for name in kmp.__all__ if not inspect.ismodule(getattr(kmp, name))],
    kmp.layers: kmp.layers.__all__,
    kmp.callbacks: kmp.callbacks.__all__,
    kmp.debug: kmp.debug.__all__,
    kmp.summaries: ["SummaryWriter"],
}
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Warns|Example|Examples|Yields):$")


def signature_of(value: Any) -> str:
    """The arguments with their defaults, without types: `(x, y=None, *, filter_fn=None)`."""
    if isinstance(value, type) and issubclass(value, Warning):
        return ""
    signature = inspect.signature(value)
    plain = [
        p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"
    ]
    bare = signature.replace(parameters=plain, return_annotation=signature.empty)
    return re.sub(r"<class '([\w.]+)'>", r"\1", str(bare))


def markdown(docstring: str) -> Iterator[str]:
    """A docstring's lines as Markdown: sections in bold, entries as a list, examples in fences."""
    in_list = in_example = in_fence = False
    for line in inspect.cleandoc(docstring).splitlines():
        in_fence ^= line.strip().startswith("```")
        if in_example and not line.strip():
            yield "```"
            in_example = False
        if not in_fence and not in_example and line.startswith(">>> "):
            yield "```pycon"
            in_example = True
        section = _SECTION.match(line)
        if section:
            in_list = not section[1].startswith("Example")
            yield f"**{section[1]}**"
            if in_list:
                yield ""
        elif in_list and line.startswith("    ") and not in_fence:
            entry = line[4:]
            yield entry if entry.startswith((" ", "-")) else f"- {entry}"
        else:
            in_list = in_list and not line.strip()
            yield line
    if in_example:
        yield "```"


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of kmp's own that have something to say, in order."""
    seen = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("kmp"):
            continue
        for name, value in vars(base).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            documented = inspect.isfunction(function) and function.__doc__
            if documented and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, value


def entry(module: ModuleType, name: str) -> Iterator[str]:
    """The part of the page about one public name."""
    value = getattr(module, name)
    yield from (f"### `{module.__name__}.{name}`", "")
    if callable(value):
        yield from ("```", f"{name}{signature_of(value)}", "```", "")
    yield from markdown(value.__doc__ or "")
    yield ""
    if inspect.isclass(value):
        for method, function in methods_of(value):
            is_property = isinstance(function, property)
            called = "" if is_property else signature_of(getattr(value, method))
            yield from (f"#### `{name}.{method}{called}`", "")
            yield from markdown((function.fget if is_property else getattr(value, method)).__doc__)
            yield ""


def page() -> str:
    """The whole page."""
    lines = [
        "# API reference",
        "",
        "Generated from the docstrings by `python docs/generate_api.py`; their examples run in",
        "`tests/test_docstrings.py`. Shapes stand behind dtypes: `float32[num_variables, 5]`.",
        "",
    ]
    for module, names in MODULES.items():
        listed = ", ".join(f"`{name}`" for name in names if name != "__version__")
        lines.append(f"- [`{module.__name__}`](#{module.__name__.replace('.', '')}): {listed}")
    lines.append("")
    for module, names in MODULES.items():
        lines += [f"## {module.__name__}", "", *inspect.cleandoc(module.__doc__ or "").split("\n")]
        lines.append("")
        for name in names:
            if name != "__version__":
                lines += entry(module, name)
    text = "\n".join(line.rstrip() for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

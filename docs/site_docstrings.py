"""Shows the examples of docstrings on the site: doctests become blocks of code."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Examples?:$", re.MULTILINE)
_DOCTEST = re.compile(r"^>>> .*\n?(?:.+\n?)*", re.MULTILINE)  # up to an empty line


class Examples(griffe.Extension):
    """Fences the doctests that stand in docstrings without indentation, as kmp's do."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called with each object when all are loaded."""
        if obj.docstring and not obj.is_alias:
            text = _EXAMPLE.sub("**Example:**", obj.docstring.value)
            fenced = _DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)
            obj.docstring.value = fenced.rstrip()

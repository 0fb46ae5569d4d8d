"""An extension of griffe, which reads docstrings for mkdocstrings: doctests become blocks of Python.

Without it only those of a section ``Examples:`` would; elsewhere Markdown takes ``>>>`` for a quotation.
"""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """Return a docstring with fences around its doctests, which end at an empty line."""
    return DOCTEST.sub(lambda match: f"{match['indent']}```pycon\n{match.group()}\n{match['indent']}```", docstring)


class Doctests(griffe.Extension):
    """Fences the doctests of every object with a docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of ``obj``."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

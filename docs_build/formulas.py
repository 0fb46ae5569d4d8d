r"""A Markdown extension: formulas between dollar signs become MathML, which browsers render by themselves.

``$…$`` is a formula in a line of text, ``$$…$$`` as a paragraph of its own is one in a block. In a table the bar is
written ``\vert``.
"""

import re
from xml.etree import ElementTree

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.inlinepatterns import InlineProcessor

IN_A_LINE = r"(?<![\\$\w])\$(?![\s$])((?:\\.|[^$\\])+?)(?<!\s)\$(?!\w)"
BLOCK = re.compile(r"^\$\$(.+)\$\$$", re.DOTALL)


class InALine(InlineProcessor):
    """``$…$``."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802  # Markdown's own name
        return self.md.htmlStash.store(convert(m.group(1))), m.start(0), m.end(0)


class InABlock(BlockProcessor):
    """``$$…$$``."""

    def test(self, parent: ElementTree.Element, block: str) -> bool:
        return BLOCK.match(block.strip()) is not None

    def run(self, parent: ElementTree.Element, blocks: list[str]) -> None:
        found = BLOCK.match(blocks.pop(0).strip())
        assert found is not None, "Markdown calls run() after test()"
        paragraph = ElementTree.SubElement(parent, "p", {"class": "formula"})
        paragraph.text = self.parser.md.htmlStash.store(convert(found.group(1).strip(), display="block"))


class Formulas(Extension):
    """The two patterns, before those of Markdown, which would read ``_`` and ``*`` as emphasis."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # Markdown's own name
        md.inlinePatterns.register(InALine(IN_A_LINE, md), "formula", 189)  # 190 is code between backticks
        md.parser.blockprocessors.register(InABlock(md.parser), "formula", 95)


def makeExtension(**kwargs: object) -> Formulas:  # noqa: N802  # Markdown's own name
    """Make the extension, as Markdown asks a module for it."""
    return Formulas(**kwargs)

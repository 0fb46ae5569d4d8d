"""Summaries: the contents of a model and its costs."""

from .model import summarize as summarize, summary as summary
from .table import Summary as Summary

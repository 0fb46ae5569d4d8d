"""Summaries: what a model consists of, and what it costs."""

from .model import summarize as summarize, summary as summary
from .table import Summary as Summary

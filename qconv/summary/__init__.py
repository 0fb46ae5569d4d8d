"""Summaries: the contents of a model and its costs."""

from .costs_table import Summary as Summary
from .layer_costs import summarize as summarize, summary as summary

"""Runs side by side, read from their folders without importing torch: what differs, and the figures over the seeds."""

from .groups import Group as Group, compare as compare
from .runs import Run as Run, find_runs as find_runs

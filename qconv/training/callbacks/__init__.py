"""Callbacks of Lightning: what a run does beside its steps."""

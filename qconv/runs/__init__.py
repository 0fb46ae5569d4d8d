"""Runs, read from their folders without importing torch: their files, what differs, the figures over the seeds."""

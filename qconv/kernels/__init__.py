"""Operators of integer inference and of signs in training: definitions, and their C and oneDNN kernels."""

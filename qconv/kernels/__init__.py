"""Operators on signs and codes: definitions, and their C and oneDNN kernels."""

"""Operators of integer inference and of signs in training: definitions, and C and oneDNN behind them."""

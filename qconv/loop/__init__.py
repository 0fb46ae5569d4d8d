"""The life of quantizers in a model: calibration, updates after each optimizer step, progress."""

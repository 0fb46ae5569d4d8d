"""What happens to quantizers in the life of a model: calibration, what follows a step, progress."""

"""What a trained network is asked and given without labels or training: sensitivity, bits, biases, rounding."""

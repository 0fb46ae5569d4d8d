"""Analysis and quantization of a trained network without more training: sensitivity, bits, biases, rounding."""

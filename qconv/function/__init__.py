"""The autograd Function of every quantized layer, and what it computes with.

`quantized_op` holds the Function. It asks `sums` for exact sums of codes, and `operations` for the convolutions, linear
layers and their gradients. `kept_input` is what its backward has of the input: the tensor, or in a lean model bits of
it, from which `recipes`, `streams` and `held` compute a tensor of the forward again. Then `output` chooses between the
operation itself and the ways that compute on bits: `bit_operations`, `number_operations` and `sign_weight`.
"""

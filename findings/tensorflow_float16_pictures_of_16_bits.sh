#!/usr/bin/env bash
# tensorflow 2.21.0: from uint16 to float16, convert_image_dtype makes white infinite; back, all pixels are one code.
#
# Its docstring lists both types, and says that values are scaled between the ranges 0 to 65535 and 0 to 1.
# Expected: the numbers of a way through float32, within the rounding of float16: white is 1, and comes back as 65535.
# Happens: from uint16, numbers are cast before they are divided, and those from 65520 on are too large for float16:
# infinity. Back, the factor 65536 is infinite in float16, and so is every pixel above 0: with saturate 65504, without
# it what the machine makes of infinity, here 0. bfloat16 is right. Rescaling in float16 makes white infinite, too.
# Seen, for all codes: to float16 16 infinities (through float32: 0), white inf, others within 0.0003; to bfloat16 0
# infinities. From float16, 0.25 0.5 1 as uint16 0 0 0, with saturate 65504 65504 65504; through float32 16383 32767
# 65535.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python tensorflow-cpu==2.21.0
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import tensorflow as tf

convert = tf.image.convert_image_dtype
codes = np.arange(65536, dtype=np.uint16).reshape(256, 256, 1)
picture = tf.io.decode_png(tf.io.encode_png(codes), dtype=tf.uint16)
assert (picture.numpy() == codes).all()
for dtype, infinities in ((tf.float16, 16), (tf.bfloat16, 0), (tf.float32, 0)):
    found = convert(picture, dtype).numpy().astype(np.float64)
    through = tf.cast(convert(picture, tf.float32), dtype).numpy().astype(np.float64)
    finite = np.isfinite(found)
    error = abs(found - codes / 65535.0)[finite].max()
    print(f"uint16 to {dtype.name}: {(~finite).sum()} infinities, white {found.max()}, others within {error:.4f}")
    assert (~finite).sum() == infinities and np.isinf(found[codes >= 65520]).all() == (infinities > 0)
    assert error < 0.002 and abs(through - codes / 65535.0).max() < 0.002
rescaled = tf.keras.layers.Rescaling(1 / 65535, dtype="float16")(picture).numpy()
assert np.isinf(rescaled).sum() == 16
shares = np.array([0.25, 0.5, 1], np.float16)
for saturate in (False, True):
    found = convert(shares, tf.uint16, saturate=saturate).numpy()
    print(f"float16 to uint16, saturate={saturate}:", *found)
    assert len(set(found)) == 1 and (found[0] == 65504 or not saturate)
through = convert(tf.cast(shares, tf.float32), tf.uint16, saturate=True).numpy()
assert through.tolist() == [16383, 32767, 65535]
END

#!/usr/bin/env bash
# mindspore 2.10.0, paddlepaddle 3.3.1: means and sums of int8, uint8 and int16 wrap in the type of the codes.
#
# Expected: as in NumPy and PyTorch, a sum of small integers has 64 bits; a mean is a float, or is refused. Both
# libraries know it: mindspore.ops.sum and paddle.cumsum give int64.
# Happens: mindspore.ops.mean, Tensor.mean and mint.mean add in 8 or 16 bits and divide what is left. paddle.sum keeps
# int8, uint8 and int16, while it gives int64 for int32. A global average of a picture or of activations' codes
# is noise. Nothing is said.
# Seen, for 300 times 100, whose mean is 100 and sum 30000: means of mindspore 0, as int8 and uint8; sums of paddle 48,
# as int8 and uint8. For 1000 times 100 as int16, mean -31 and sum -31072.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet mindspore
uv venv --quiet paddle
uv pip install --quiet --python mindspore/bin/python mindspore==2.10.0 numpy==1.26.4
uv pip install --quiet --python paddle/bin/python paddlepaddle==3.3.1 setuptools==84.2.1 numpy==2.4.6
mindspore/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import mindspore
import numpy as np
from mindspore import mint, ops

for dtype, count, wrong in ((np.int8, 300, 0), (np.uint8, 300, 0), (np.int16, 1000, -31)):
    codes = mindspore.Tensor(np.full(count, 100, dtype))
    means = [each.asnumpy() for each in (ops.mean(codes), codes.mean(), mint.mean(codes))]
    total = ops.sum(codes).asnumpy()
    print(f"mindspore, {count} times 100 as {dtype.__name__}: means", *means, "ops.sum", total)
    assert all(mean == wrong and mean.dtype == dtype for mean in means)
    assert total == 100 * count
END
paddle/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import paddle

for dtype, count, wrong in ((np.int8, 300, 48), (np.uint8, 300, 48), (np.int16, 1000, -31072), (np.int32, 300, 30000)):
    codes = paddle.to_tensor(np.full(count, 100, dtype))
    total, running = paddle.sum(codes).numpy(), paddle.cumsum(codes).numpy()
    print(f"paddle, {count} times 100 as {dtype.__name__}: sum {total} as {total.dtype}, cumsum ends {running[-1]}")
    assert total == wrong
    assert running[-1] == 100 * count or dtype == np.int16
END

#!/usr/bin/env bash
# ncnn 1.0.20261020: an int8 convolution in groups of 8, 16, 24 or more filters gives numbers that are no sums.
#
# Expected: the sums of its 8-bit codes, as without packed layouts (use_packing_layout off), as with depthwise
# convolutions, and as with groups of other sizes.
# Happens: if the filters of a group are a multiple of 8, as in ResNeXt and ShuffleNet, a convolution in groups gives
# other numbers of any size, at times NaN, and others from run to run. Nothing is said. Packed layouts are the default.
# Seen on x86-64 with AVX-512, as largest error by largest output: groups of 4, 12, 20 filters 1e-07, depthwise 1e-04,
# groups of 8, 16, 24, 32 filters 1 to 8e+36, or NaN. Without packed layouts at most 2e-07.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ncnn==1.0.20261020 numpy==2.4.6
OMP_NUM_THREADS=1 environment/bin/python -W ignore - <<'END'
import ncnn
import numpy as np

SIZE = 8
random = np.random.default_rng(0)


def outputs(inputs, filters, groups):
    """What a 1 x 1 convolution must give for its codes, and what ncnn gives with and without packed layouts."""
    weight, bias = random.normal(size=(filters, inputs // groups)), random.normal(size=filters).astype(np.float32)
    image = random.normal(size=(inputs, SIZE, SIZE)).astype(np.float32)
    scales = (127 / abs(weight.reshape(groups, -1)).max(1)).astype(np.float32)
    scale = np.float32(127 / abs(image).max())
    of_filter = np.repeat(scales, filters // groups)[:, None]
    codes = np.rint(weight * of_filter).astype(np.int8)
    with open("network.param", "w") as file:
        file.write(f"7767517\n2 2\nInput input 0 1 x 0={SIZE} 1={SIZE} 2={inputs}\n")
        file.write(f"ConvolutionDepthWise layer 1 1 x y 0={filters} 1=1 5=1 6={codes.size} 7={groups} 8=1\n")
    with open("network.bin", "wb") as file:
        file.write((0x000D4B38).to_bytes(4, "little"))  # codes in int8 follow, padded to 4 bytes
        file.write(codes.tobytes() + b"\0" * (-codes.size % 4))
        file.write(bias.tobytes() + scales.tobytes() + scale.tobytes())
    parts = np.rint(image * scale).reshape(groups, -1, SIZE * SIZE) / scale
    kernels = (codes / of_filter).reshape(groups, filters // groups, -1)
    wanted = (kernels @ parts).reshape(filters, SIZE, SIZE) + bias[:, None, None]
    found = []
    for packed in (True, False):
        network = ncnn.Net()
        network.opt.num_threads, network.opt.use_packing_layout = 1, packed
        assert network.load_param("network.param") == 0 and network.load_model("network.bin") == 0
        extractor = network.create_extractor()
        extractor.input("x", ncnn.Mat(image).clone())
        found.append(np.array(extractor.extract("y")[1]))
    return wanted, *found


for channels, groups in ((8, 8), (8, 2), (16, 2), (24, 2), (32, 2), (40, 2), (48, 2), (24, 3), (128, 4)):
    wanted, packed, plain = outputs(channels, channels, groups)
    error, plain_error = (abs(found - wanted).max() / abs(wanted).max() for found in (packed, plain))
    print(f"{channels} channels, {groups} groups: error {error:.0e}, without packed layouts {plain_error:.0e}")
    assert plain_error < 1e-5
    assert (error < 1e-3) == (channels // groups % 8 != 0)
    assert error < 1e-3 or not error < 0.1
END

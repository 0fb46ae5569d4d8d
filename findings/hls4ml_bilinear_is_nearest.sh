#!/usr/bin/env bash
# hls4ml 1.3.0: a bilinear Upsample of PyTorch copies the nearest pixel, if the configuration is made layer by layer.
#
# Expected: means of neighbours, as in PyTorch, or an error: the C++ of hls4ml has no bilinear upsampling.
# Happens: config_from_pytorch_model with granularity="name", which per-layer precisions need, writes its default
# algorithm, "nearest", and that replaces the mode of the network. With granularity="model" g++ stops with an error that
# resize_bilinear is missing. A decoder trained with slopes gets blocks. Nothing is said.
# Seen, for rows of 0 and 4 and a factor of 2: PyTorch 0 1 3 4, hls4ml 0 0 4 4; nearest: both 0 0 4 4.
# Needs g++.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python hls4ml==1.3.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import hls4ml
import torch
from torch import nn

torch.set_num_threads(1)


def outputs(model, x, **options):
    """What PyTorch and hls4ml's C simulation give."""
    config = hls4ml.utils.config_from_pytorch_model(
        model.eval(),
        tuple(x.shape[1:]),
        granularity="name",
        backend="Vitis",
        default_precision="fixed<32,12>",
        **options,
    )
    made = hls4ml.converters.convert_from_pytorch_model(model, output_dir="project", backend="Vitis", hls_config=config)
    made.compile()
    return model(x).detach().flatten(), torch.from_numpy(made.predict(x.numpy())).flatten()


image = torch.tensor([[[[0.0, 4.0], [0.0, 4.0]]]])
for mode, wanted in (("nearest", [0, 0, 4, 4]), ("bilinear", [0, 1, 3, 4])):
    right, found = outputs(nn.Sequential(nn.Upsample(scale_factor=2, mode=mode)), image)
    right, found = right[:4].tolist(), found[:4].tolist()
    print(f"RESULT {mode}: PyTorch", *right, "hls4ml", *found)
    assert right == wanted
    assert found == [0, 0, 4, 4]
END
sed -n 's/^RESULT //p' log

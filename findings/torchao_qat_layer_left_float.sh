#!/usr/bin/env bash
# torchao 0.18.0: prepare_qat_pt2e fails if set_module_name_qconfig(name, None) leaves a layer float.
#
# Expected: the first layer stays float, as with prepare_pt2e and the same quantizer; networks are often trained so.
# Happens: prepare_qat_pt2e ends in "IndexError: list index out of range" while it joins convolutions and batch norms.
# It works if the layer has a config, the default one of 8 bits.
# Seen: after training, None: prepared; in training, None: list index out of range; in training, 8 bits: prepared
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torchao==0.18.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - <<'END'
import torch
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)


def prepared(in_training, is_float):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    config = get_default_x86_inductor_quantization_config(is_qat=in_training)
    quantizer = X86InductorQuantizer().set_global(config).set_module_name_qconfig("0", None if is_float else config)
    program = torch.export.export(network, (torch.randn(2, 3, 8, 8),)).module()
    try:
        (prepare_qat_pt2e if in_training else prepare_pt2e)(program, quantizer)
    except IndexError as error:
        return str(error)
    return "prepared"


found = prepared(False, True), prepared(True, True), prepared(True, False)
print("after training, None: {}; in training, None: {}; in training, 8 bits: {}".format(*found))
assert found == ("prepared", "list index out of range", "prepared")
END

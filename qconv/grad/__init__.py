"""The gradients of convolution: by torch's operator, by forward convolutions (`composed`), and of deformable ones."""

from . import composed as composed, deform as deform
from .aten import (
    conv1d_input as conv1d_input,
    conv1d_weight as conv1d_weight,
    conv2d_input as conv2d_input,
    conv2d_weight as conv2d_weight,
    conv3d_input as conv3d_input,
    conv3d_weight as conv3d_weight,
    conv_backward as conv_backward,
    conv_transpose1d_input as conv_transpose1d_input,
    conv_transpose1d_weight as conv_transpose1d_weight,
    conv_transpose2d_input as conv_transpose2d_input,
    conv_transpose2d_weight as conv_transpose2d_weight,
    conv_transpose3d_input as conv_transpose3d_input,
    conv_transpose3d_weight as conv_transpose3d_weight,
)

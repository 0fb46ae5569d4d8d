"""Optimizers of quantized networks: parameter groups by what a parameter is, Bop, and DeepShift-PS's weight decay."""

from .bop import Bop as Bop
from .groups import KINDS as KINDS, ModelOptimizer as ModelOptimizer, parameter_groups as parameter_groups
from .penalty import shift_penalty as shift_penalty

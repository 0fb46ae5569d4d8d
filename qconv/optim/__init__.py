"""Optimizers of quantized networks, groups of parameters, and rules for weights around a step."""

from .bop import Bop as Bop
from .groups import KINDS as KINDS, ModelOptimizer as ModelOptimizer, parameter_groups as parameter_groups
from .oscillations import Oscillations as Oscillations
from .penalty import (
    dampening_penalty as dampening_penalty,
    shift_penalty as shift_penalty,
    sine_penalty as sine_penalty,
)
from .silent_weights import OvSW as OvSW
from .step_rules import StepRule as StepRule

"""Quantizers: one method, one file. `base.Quantizer` is their contract."""

from .base import Codes as Codes
from .base import Quantizer as Quantizer
from .bnn import Sign as Sign
from .bnn import sign as sign
from .deepshift import FixedPoint as FixedPoint
from .deepshift import ShiftPS as ShiftPS
from .deepshift import ShiftQ as ShiftQ
from .deepshift import round_power_of_two as round_power_of_two
from .identity import Identity as Identity
from .stages import Stages as Stages
from .stochastic import Stream as Stream
from .surrogates import EDE as EDE
from .surrogates import ApproxSign as ApproxSign
from .surrogates import HardClip as HardClip
from .surrogates import Polynomial as Polynomial
from .surrogates import ReSTE as ReSTE
from .surrogates import Straight as Straight
from .surrogates import Surrogate as Surrogate
from .surrogates import SwishSign as SwishSign
from .xnor import ScaledSign as ScaledSign
from .xnor import filter_scale as filter_scale
from .xnor import input_scale as input_scale

"""Schemes: which quantizer a layer puts on its input, its weight and its output gradient.

A scheme is plain data and each published one a plain function. Write your own by calling `Scheme` with your quantizers.
"""

from .binary import bnn as bnn
from .binary import bwn as bwn
from .binary import xnor as xnor
from .scheme import Scheme as Scheme
from .scheme import check_padding_value as check_padding_value
from .scheme import identity as identity
from .shift import shift_ps as shift_ps
from .shift import shift_q as shift_q

__all__ = ["Scheme", "bnn", "bwn", "identity", "shift_ps", "shift_q", "xnor"]

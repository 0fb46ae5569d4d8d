"""Schemes: which quantizer a layer puts on its input, its weight and its output gradient.

A scheme is plain data and each published one a plain function. Write your own by calling `Scheme` with your quantizers.
"""

from .binary import adabin as adabin
from .binary import bireal as bireal
from .binary import bnn as bnn
from .binary import bwn as bwn
from .binary import irnet as irnet
from .binary import reactnet as reactnet
from .binary import recu as recu
from .binary import reste as reste
from .binary import xnor as xnor
from .binary import xnorpp as xnorpp
from .lowbit import dsq as dsq
from .lowbit import fp8 as fp8
from .lowbit import minmax as minmax
from .lowbit import n2uq as n2uq
from .lowbit import percentile as percentile
from .scheme import Factory as Factory
from .scheme import Scheme as Scheme
from .scheme import check_padding_value as check_padding_value
from .scheme import identity as identity
from .shift import apot as apot
from .shift import inq as inq
from .shift import shift_ps as shift_ps
from .shift import shift_q as shift_q
from .shift import ttq as ttq
from .shift import twn as twn
from .staged import staged as staged
from .staged import two_stage as two_stage
from .uniform import dorefa as dorefa
from .uniform import lsq as lsq
from .uniform import lsq_plus as lsq_plus
from .uniform import pact as pact

__all__ = [
    "Scheme",
    "adabin",
    "apot",
    "bireal",
    "bnn",
    "bwn",
    "dorefa",
    "dsq",
    "fp8",
    "identity",
    "inq",
    "irnet",
    "lsq",
    "lsq_plus",
    "minmax",
    "n2uq",
    "pact",
    "percentile",
    "reactnet",
    "recu",
    "reste",
    "shift_ps",
    "shift_q",
    "staged",
    "ttq",
    "twn",
    "two_stage",
    "xnor",
    "xnorpp",
]

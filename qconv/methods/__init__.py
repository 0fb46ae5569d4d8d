"""Methods, one paper per file: its mathematics, its quantizers and its scheme. One import line each."""

from .adabin import AdaBinInput as AdaBinInput, AdaBinWeight as AdaBinWeight, adabin as adabin
from .apot import APoTInput as APoTInput, APoTWeight as APoTWeight, apot as apot
from .biper import BiPerWeight as BiPerWeight, SineWeight as SineWeight, biper as biper
from .bireal import BiRealWeight as BiRealWeight, bireal as bireal
from .bnn import Sign as Sign, bnn as bnn
from .deepshift import (
    FixedPoint as FixedPoint,
    ShiftPS as ShiftPS,
    ShiftQ as ShiftQ,
    round_power_of_two as round_power_of_two,
    shift_ps as shift_ps,
    shift_q as shift_q,
)
from .dorefa import (
    DoReFaGradient as DoReFaGradient,
    DoReFaInput as DoReFaInput,
    DoReFaWeight as DoReFaWeight,
    dorefa as dorefa,
)
from .dsq import DSQInput as DSQInput, DSQWeight as DSQWeight, dsq as dsq
from .ewgs import EWGSInput as EWGSInput, EWGSWeight as EWGSWeight, ewgs as ewgs
from .fda import fda as fda
from .fp8 import FP8 as FP8, fp8 as fp8
from .inq import INQ as INQ, inq as inq
from .int8 import Int8Stochastic as Int8Stochastic
from .irnet import IRNetWeight as IRNetWeight, irnet as irnet
from .lsq import LSQ as LSQ, LSQInput as LSQInput, lsq as lsq
from .lsq_plus import LSQPlus as LSQPlus, LSQPlusInput as LSQPlusInput, lsq_plus as lsq_plus
from .minmax import (
    MinMaxInput as MinMaxInput,
    MinMaxWeight as MinMaxWeight,
    PercentileInput as PercentileInput,
    PercentileWeight as PercentileWeight,
    minmax as minmax,
    percentile as percentile,
)
from .n2uq import N2UQInput as N2UQInput, N2UQWeight as N2UQWeight, n2uq as n2uq
from .pact import PACT as PACT, pact as pact
from .reactnet import ReActNetInput as ReActNetInput, reactnet as reactnet
from .recu import ReCUInput as ReCUInput, ReCUWeight as ReCUWeight, recu as recu
from .reste import ReSTEWeight as ReSTEWeight, reste as reste
from .sawb import SAWB as SAWB, sawb as sawb
from .siman import SiManInput as SiManInput, SiManWeight as SiManWeight, siman as siman
from .staged import layerwise as layerwise, staged as staged, two_stage as two_stage
from .ttq import TTQ as TTQ, ttq as ttq
from .twn import TWN as TWN, twn as twn
from .xnor import ScaledSign as ScaledSign, bwn as bwn, input_scale as input_scale, xnor as xnor
from .xnorpp import XNORppWeight as XNORppWeight, xnorpp as xnorpp

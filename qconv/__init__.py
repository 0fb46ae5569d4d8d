"""qconv: train convolutional networks with binary, ternary, power-of-two and low-bit weights in PyTorch."""

from . import grad as grad
from . import grad_composed as grad_composed
from . import quantizers as quantizers
from . import schemes as schemes
from .calibrate import calibrate as calibrate
from .convert import Plan as Plan
from .convert import convert as convert
from .convert import float_state_dict as float_state_dict
from .convert import plan as plan
from .convert import to_float as to_float
from .layers import BNNConv2d as BNNConv2d
from .layers import BWNConv2d as BWNConv2d
from .layers import Conv2dShift as Conv2dShift
from .layers import Conv2dShiftQ as Conv2dShiftQ
from .layers import QConv1d as QConv1d
from .layers import QConv2d as QConv2d
from .layers import QConv3d as QConv3d
from .layers import QConvTranspose1d as QConvTranspose1d
from .layers import QConvTranspose2d as QConvTranspose2d
from .layers import QConvTranspose3d as QConvTranspose3d
from .layers import QLinear as QLinear
from .layers import QuantizedLayer as QuantizedLayer
from .layers import XNORConv2d as XNORConv2d
from .quantizers import Quantizer as Quantizer
from .schemes import Scheme as Scheme
from .steps import after_every_step as after_every_step
from .steps import after_step as after_step
from .steps import set_progress as set_progress

__version__ = "0.1.0"

"""Integer inference: programs of trained models, and what runs them."""

from .build import Frozen as Frozen, FrozenModel as FrozenModel
from .freeze import freeze as freeze
from .program_file import save_program as save_program
from .verify import LayerCheck as LayerCheck, Verification as Verification, verify as verify

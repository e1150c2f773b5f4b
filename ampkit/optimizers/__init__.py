"""What a session does to an optimizer: masters, gradients, and a step that can be skipped."""

from .adapter import OptimizerAdapter as OptimizerAdapter
from .adapter import adapter_of as adapter_of
from .gradients import Gradients as Gradients
from .master import Slot as Slot

"""The module that people know by this name: everything in it is unisono.multi_gpu's.

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
"""

from unisono.multi_gpu import *  # noqa: F403
from unisono.multi_gpu import __all__  # noqa: F401

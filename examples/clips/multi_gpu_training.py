"""Re-exports unisono.multi_gpu under the name of the original module.

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
"""

from unisono.multi_gpu import *  # noqa: F403
from unisono.multi_gpu import __all__  # noqa: F401

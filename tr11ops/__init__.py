"""The operations toolkit of tr11: launch, watch, stop and keep a training alive. Never imports
torch.
"""

__version__ = "0.1.0"

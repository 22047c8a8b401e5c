"""MiniCPM-o 4.5 on Triton Inference Server with vLLM."""

__version__ = "0.1.0"

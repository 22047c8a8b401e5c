"""Measurements on an NVIDIA GPU with random weights at the model's full size.

Each is a command, run in the repository's root: ``python -m benchmarks.encoders`` and
``python -m benchmarks.traffic``. Each prints tables and ends with one line of JSON.
"""

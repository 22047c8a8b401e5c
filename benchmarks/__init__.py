"""Measurements on an NVIDIA GPU with random weights at the model's full size.

Each is a command, run in the repository's root: ``python -m benchmarks.encoders``, ``kernel_choices``,
``traffic`` and ``pipeline``. Each prints tables and ends with one line of JSON.
"""

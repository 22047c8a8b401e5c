"""The only code that knows Triton's Python backend: tensors in, tensors out, errors to replies."""

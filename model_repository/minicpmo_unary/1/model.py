from minicpmo_triton.triton.unary import UnaryModel as TritonPythonModel  # noqa: F401

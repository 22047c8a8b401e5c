from minicpmo_triton.triton.preprocess import Preprocess as TritonPythonModel  # noqa: F401

from minicpmo_triton.triton.encoder import VisionEncoderModel as TritonPythonModel  # noqa: F401

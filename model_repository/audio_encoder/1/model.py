from minicpmo_triton.triton.encoder import AudioEncoderModel as TritonPythonModel  # noqa: F401

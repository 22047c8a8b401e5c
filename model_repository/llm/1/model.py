from minicpmo_triton.triton.llm import LLMModel as TritonPythonModel  # noqa: F401

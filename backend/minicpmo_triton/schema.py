"""Every tensor that crosses a Triton model's border, declared once.

The ``config.pbtxt`` files repeat these declarations because Triton reads them; a test holds the two
against each other. ``-1`` is a dimension that varies. No model has a batch dimension.

Letters: T prompt tokens, P patches, S slices, F mel frames, C audio chunks, N embedding rows,
H the language model's hidden size, M media items.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PATCH_SIZE = 14
PATCH_VALUES = 3 * PATCH_SIZE * PATCH_SIZE
MEL_BINS = 80
MAX_MEL_FRAMES = 3000

#: Data type of embeddings in the repository as it stands; the launcher derives an FP32 one for float32.
EMBEDS_DTYPE = "BF16"


@dataclass(frozen=True)
class Tensor:
    """A tensor's name, Triton data type (as in config.pbtxt, without ``TYPE_``) and dimensions."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class Model:
    """Inputs and outputs of one Triton model."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    decoupled: bool = False


# What a client sends.
TEXT_INPUT = Tensor("text_input", "STRING", (1,), optional=True)
MESSAGES = Tensor("messages", "STRING", (1,), optional=True)
IMAGE = Tensor("image", "STRING", (-1,), optional=True)  # [M] file bytes, base64 or data URI
AUDIO = Tensor("audio", "STRING", (-1,), optional=True)  # [M] file bytes, base64 or data URI
VIDEO = Tensor("video", "STRING", (-1,), optional=True)  # [M] file bytes, base64 or data URI
MEDIA_PARAMETERS = Tensor("media_parameters", "STRING", (1,), optional=True)  # JSON object
STREAM = Tensor("stream", "BOOL", (1,), optional=True)
SAMPLING_PARAMETERS = Tensor("sampling_parameters", "STRING", (1,), optional=True)  # JSON object
EXCLUDE_INPUT = Tensor("exclude_input_in_output", "BOOL", (1,), optional=True)
RETURN_FINISH_REASON = Tensor("return_finish_reason", "BOOL", (1,), optional=True)
RETURN_CUMULATIVE_LOGPROB = Tensor("return_cumulative_logprob", "BOOL", (1,), optional=True)
RETURN_LOGPROBS = Tensor("return_logprobs", "BOOL", (1,), optional=True)
RETURN_NUM_INPUT_TOKENS = Tensor("return_num_input_tokens", "BOOL", (1,), optional=True)
RETURN_NUM_OUTPUT_TOKENS = Tensor("return_num_output_tokens", "BOOL", (1,), optional=True)
RETURN_REASONING = Tensor("return_reasoning_output", "BOOL", (1,), optional=True)
#: A request with only this aborts the generations whose Triton request id it names.
CANCEL_REQUEST_ID = Tensor("cancel_request_id", "STRING", (1,), optional=True)

# What travels between the models.
INPUT_IDS = Tensor("input_ids", "INT32", (-1,))  # [T] placeholder positions hold the <unk> id
PATCHES = Tensor("patches", "UINT8", (-1, PATCH_VALUES))  # [P, 588] slices one after another
GRID_SIZES = Tensor("grid_sizes", "INT32", (-1, 2))  # [S, 2] rows, columns of patches; products sum to P
MEL = Tensor("mel", "FP32", (-1, MEL_BINS))  # [F, 80] log-mel frames, chunks one after another
MEL_LENGTHS = Tensor("mel_lengths", "INT32", (-1,))  # [C] frames per chunk, at most 3000; sum F
IMAGE_POSITIONS = Tensor("image_positions", "INT32", (-1,))  # [N] index in input_ids of each row
AUDIO_POSITIONS = Tensor("audio_positions", "INT32", (-1,))  # [N] index in input_ids of each row
IMAGE_EMBEDS = Tensor("image_embeds", EMBEDS_DTYPE, (-1, -1))  # [N, H] 64 rows per slice
AUDIO_EMBEDS = Tensor("audio_embeds", EMBEDS_DTYPE, (-1, -1))  # [N, H]

# What a client gets. The leading dimension is the number of sequences (sampling parameter ``n``).
TEXT_OUTPUT = Tensor("text_output", "STRING", (-1,))
REASONING_OUTPUT = Tensor("reasoning_output", "STRING", (-1,))  # the thinking, apart from text_output
FINISH_REASON = Tensor("finish_reason", "STRING", (-1,))
CUMULATIVE_LOGPROB = Tensor("cumulative_logprob", "FP32", (-1,))
LOGPROBS = Tensor("logprobs", "STRING", (-1,))  # JSON: per token a list of {token_id: {...}}, or null
NUM_INPUT_TOKENS = Tensor("num_input_tokens", "UINT32", (1,))
NUM_OUTPUT_TOKENS = Tensor("num_output_tokens", "UINT32", (-1,))

MEDIA_INPUTS = (TEXT_INPUT, MESSAGES, IMAGE, AUDIO, VIDEO, MEDIA_PARAMETERS)
ANSWER = (
    TEXT_OUTPUT,
    REASONING_OUTPUT,
    FINISH_REASON,
    CUMULATIVE_LOGPROB,
    LOGPROBS,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
)
#: Input that asks ``llm``, used directly, for an output beside the text -> that output.
RETURN_FLAGS = {
    RETURN_REASONING: REASONING_OUTPUT,
    RETURN_FINISH_REASON: FINISH_REASON,
    RETURN_CUMULATIVE_LOGPROB: CUMULATIVE_LOGPROB,
    RETURN_LOGPROBS: LOGPROBS,
    RETURN_NUM_INPUT_TOKENS: NUM_INPUT_TOKENS,
    RETURN_NUM_OUTPUT_TOKENS: NUM_OUTPUT_TOKENS,
}
ANSWER_INPUTS = (SAMPLING_PARAMETERS, EXCLUDE_INPUT, *RETURN_FLAGS)
PROMPT = (INPUT_IDS, IMAGE_POSITIONS, AUDIO_POSITIONS)
ENCODED = (*PROMPT, IMAGE_EMBEDS, AUDIO_EMBEDS)


def _optional(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(replace(tensor, optional=True) for tensor in tensors)


PREPROCESS = Model("preprocess", MEDIA_INPUTS, (*PROMPT, PATCHES, GRID_SIZES, MEL, MEL_LENGTHS))
VISION_ENCODER = Model("vision_encoder", (PATCHES, GRID_SIZES), (IMAGE_EMBEDS,))
AUDIO_ENCODER = Model("audio_encoder", (MEL, MEL_LENGTHS), (AUDIO_EMBEDS,))
#: Takes what ``encode`` gives, or the raw inputs, for which it asks ``encode`` itself.
LLM = Model(
    "llm",
    (*_optional(ENCODED), *MEDIA_INPUTS, STREAM, *ANSWER_INPUTS, CANCEL_REQUEST_ID),
    ANSWER,
    decoupled=True,
)
ENCODE = Model("encode", MEDIA_INPUTS, ENCODED)
MINICPMO = Model("minicpmo", (*MEDIA_INPUTS, STREAM, *ANSWER_INPUTS), ANSWER, decoupled=True)
MINICPMO_UNARY = Model("minicpmo_unary", (*MEDIA_INPUTS, *ANSWER_INPUTS), ANSWER)

MODELS = (PREPROCESS, VISION_ENCODER, AUDIO_ENCODER, LLM, ENCODE, MINICPMO, MINICPMO_UNARY)

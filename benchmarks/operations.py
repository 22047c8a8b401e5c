"""How many floating-point operations an encoder's matrix products and attentions take.

Two for each multiplication with its addition. Norms, activations, softmax and sums are left out: they
are bound by memory, and a fused kernel may hide them. So the count at a measured matrix rate gives a
time that nothing in the same number format can undercut.
"""

from __future__ import annotations

from collections.abc import Sequence

from minicpmo_triton.encoders import audio, vision
from minicpmo_triton.schema import PATCH_VALUES


def product(rows: int, inner: int, columns: int) -> int:
    """Of [rows, inner] @ [inner, columns]."""
    return 2 * rows * inner * columns


def vision_operations(
    num_patches: Sequence[int], config: vision.VisionConfig, tower: vision.TowerConfig
) -> int:
    """Of slices with ``num_patches`` each: tower and resampler. The queries are projected once."""
    dim, hidden, queries = tower.hidden_size, config.hidden_size, config.query_num
    total = product(queries, hidden, hidden)  # the resampler's queries
    for patches in num_patches:
        layer = (
            product(patches, dim, 4 * dim)  # query, key, value, output
            + 2 * product(patches, dim, tower.intermediate_size)
            + 2 * product(patches, dim, patches)  # scores, weighted values; the heads together
        )
        resampler = (
            product(patches, dim, hidden)
            + product(patches, hidden, 2 * hidden)  # key, value
            + 2 * product(queries, hidden, patches)
            + product(queries, hidden, 2 * hidden)  # output, projection
        )
        total += product(patches, PATCH_VALUES, dim) + tower.num_hidden_layers * layer + resampler
    return total


def audio_operations(
    num_frames: Sequence[int], config: audio.AudioConfig, tower: audio.TowerConfig, least: bool = False
) -> int:
    """Of chunks with ``num_frames`` each: convolutions, tower, projection.

    As the model is published: attention over all pairs of positions, pooling last. With ``least`` only
    the pairs that the block-causal mask leaves, and pooling before the last product, which is linear.
    """
    dim, hidden, ffn = tower.d_model, config.hidden_size, tower.encoder_ffn_dim
    total = 0
    for frames in num_frames:
        length = audio.num_positions(frames)
        pairs = visible_pairs(length, config.block_positions) if least else length**2
        rows = length // config.audio_pool_step if least else length
        layer = product(length, dim, 4 * dim) + 2 * product(length, dim, ffn) + 2 * product(pairs, dim, 1)
        total += (
            product(frames, 3 * tower.num_mel_bins, dim)
            + product(length, 3 * dim, dim)
            + tower.encoder_layers * layer
            + product(length, dim, hidden)
            + product(rows, hidden, hidden)
        )
    return total


def visible_pairs(length: int, block: int) -> int:
    """Pairs (position, seen position) where each sees its own block and all earlier ones."""
    return sum(min((position // block + 1) * block, length) for position in range(length))

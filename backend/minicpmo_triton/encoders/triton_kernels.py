"""The encoders' kernels in Triton (the language). :mod:`~minicpmo_triton.encoders.kernels` starts them.

Lengths and row counts are not specialised, so one compilation serves every shape of a model. Sums,
statistics and softmax are in float32.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, import-untyped"
# ruff: noqa: SIM108 - Triton compiles one branch of an if over a constexpr, and only of an if

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x,  # [rows, COLUMNS]
    delta,  # [rows, COLUMNS]
    weight,
    bias,
    total,  # [rows, COLUMNS], x + delta
    normed,  # [rows, COLUMNS], the layer norm of the sum
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    at = tl.program_id(0).to(tl.int64) * COLUMNS + columns
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, values.to(total.dtype.element_ty), mask=inside)
    mean = tl.sum(values, axis=0) / COLUMNS
    centred = tl.where(inside, values - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / COLUMNS + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (centred * scale * factor + offset).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def scale_patches_kernel(
    patches,  # uint8 [rows, COLUMNS]
    pixels,  # [rows, WIDTH]
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Values to [-1, 1]; the columns from COLUMNS on become zero. One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(patches + row * COLUMNS + columns, mask=columns < COLUMNS, other=0)
    scaled = tl.where(columns < COLUMNS, values.to(tl.float32) * (2 / 255) - 1, 0.0)
    tl.store(pixels + row * WIDTH + columns, scaled.to(pixels.dtype.element_ty), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["length", "out_length"])
def windows_kernel(
    x,  # [batch, length, CHANNELS]
    windows,  # [batch, out_length, 3, CHANNELS]
    length,
    out_length,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """What a convolution of width 3 and padding 1 reads. One position a program."""
    position, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    out = windows + (batch * out_length + position) * 3 * CHANNELS + channels
    for tap in tl.static_range(3):
        source = position * STRIDE + tap - 1 + tl.zeros_like(channels)
        valid = inside & (source >= 0) & (source < length)
        values = tl.load(x + (batch * length + source) * CHANNELS + channels, mask=valid, other=0.0)
        tl.store(out + tap * CHANNELS, values.to(windows.dtype.element_ty), mask=inside)


@triton.jit
def _tiles(
    acc,
    acc_rest,
    row_max,
    row_sum,
    q,
    q_rest,
    keys,  # of this head, its values VALUE_OFFSET further on
    ends,
    length,
    first,
    last,
    scale,
    ROW: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """FlashAttention's loop over the key tiles [first, last)."""
    main = tl.arange(0, MAIN)
    for start in tl.range(first, last, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        at = keys + index[:, None] * ROW + main[None, :]
        if MASKED:
            k = tl.load(at, mask=index[:, None] < length, other=0.0)
        else:
            k = tl.load(at)
        scores = tl.dot(q, tl.trans(k))
        if REST > 0:
            rest = MAIN + tl.arange(0, REST)
            at_rest = keys + index[:, None] * ROW + rest[None, :]
            real = rest[None, :] < HEAD_DIM
            if MASKED:
                real = real & (index[:, None] < length)
            k_rest = tl.load(at_rest, mask=real, other=0.0)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores)
        if MASKED:
            scores = tl.where(index[None, :] < ends[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        row_max = new_max
        acc = acc * decay[:, None]
        weights = weights.to(q.dtype)
        if MASKED:
            v = tl.load(at + VALUE_OFFSET, mask=index[:, None] < length, other=0.0)
        else:
            v = tl.load(at + VALUE_OFFSET)
        acc = tl.dot(weights, v, acc)
        if REST > 0:
            acc_rest = acc_rest * decay[:, None]
            v_rest = tl.load(at_rest + VALUE_OFFSET, mask=real, other=0.0)
            acc_rest = tl.dot(weights, v_rest, acc_rest)
    return acc, acc_rest, row_max, row_sum


@triton.jit(do_not_specialize=["length"])
def attention_kernel(
    qkv,  # [batch, length, 3, HEADS, HEAD_DIM]
    visible_end,  # int32 [length]: query i sees the keys [0, visible_end[i]); read only if CAUSAL
    out,  # [batch, length, HEADS, HEAD_DIM]
    length,
    scale,  # of the scores, times log2(e)
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,  # HEAD_DIM as a power of two ...
    REST: tl.constexpr,  # ... and another one (0: none) that covers what is left, padded with zeros
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """BLOCK_M queries of one head a program (Dao, "FlashAttention-2", 2023, forward pass)."""
    ROW: tl.constexpr = 3 * HEADS * HEAD_DIM
    VALUE_OFFSET: tl.constexpr = HEADS * HEAD_DIM  # from a key to its value
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    # The last queries see the most keys: they start first.
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    real_rows = rows < length
    queries = qkv + batch * length * ROW + head * HEAD_DIM
    keys = queries + HEADS * HEAD_DIM
    main = tl.arange(0, MAIN)
    q = tl.load(queries + rows[:, None] * ROW + main[None, :], mask=real_rows[:, None], other=0.0)
    acc = tl.zeros([BLOCK_M, MAIN], tl.float32)
    q_rest, acc_rest = q, acc
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        real = real_rows[:, None] & (rest[None, :] < HEAD_DIM)
        q_rest = tl.load(queries + rows[:, None] * ROW + rest[None, :], mask=real, other=0.0)
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    if CAUSAL:
        ends = tl.minimum(tl.load(visible_end + rows, mask=real_rows, other=0), length)
        last = tl.max(ends, axis=0)
        ends = tl.where(real_rows, ends, last)
        full = tl.min(ends, axis=0) // BLOCK_N * BLOCK_N  # keys before it are seen by all queries here
    else:
        ends = tl.zeros([BLOCK_M], tl.int32) + length
        last = length
        full = length // BLOCK_N * BLOCK_N
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # fmt: off
    acc, acc_rest, row_max, row_sum = _tiles(
        acc, acc_rest, row_max, row_sum, q, q_rest, keys, ends, length, 0, full, scale,
        ROW, VALUE_OFFSET, HEAD_DIM, MAIN, REST, BLOCK_N, False,
    )
    acc, acc_rest, row_max, row_sum = _tiles(
        acc, acc_rest, row_max, row_sum, q, q_rest, keys, ends, length, full, last, scale,
        ROW, VALUE_OFFSET, HEAD_DIM, MAIN, REST, BLOCK_N, True,
    )
    # fmt: on
    at = out + (batch * length + rows[:, None]) * (HEADS * HEAD_DIM) + head * HEAD_DIM
    values = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(at + main[None, :], values, mask=real_rows[:, None])
    if REST > 0:
        values = (acc_rest / row_sum[:, None]).to(out.dtype.element_ty)
        tl.store(at + rest[None, :], values, mask=real)

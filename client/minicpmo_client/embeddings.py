"""Embeddings by the ``encode`` model: one request per image or recording, so its rows are its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minicpmo_client import wire
from minicpmo_client.conversation import ENCODERS, as_list, json_bytes
from minicpmo_client.errors import MiniCPMOClientError, ServerError
from minicpmo_client.media import Fetch
from minicpmo_client.transport import Tensors
from minicpmo_client.wire import InputValue, Request

#: Requests of one ``embed`` call that are under way at once; the server batches across them.
MAX_IN_FLIGHT = 8

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Embeddings:
    """float32 arrays [N, hidden], one per image and per recording, in the order given.

    N is 64 per slice of an image (one more slice than it is cut into, for the whole picture), and about
    10 per second of a recording.
    """

    images: tuple[FloatArray, ...] = ()
    audio: tuple[FloatArray, ...] = ()


@dataclass(frozen=True)
class Item:
    """One image or recording; ``field`` is where the caller gave it, such as ``images[1]``."""

    kind: str
    field: str
    request: Request


def build_items(
    images: Iterable[object],
    audio: Iterable[object],
    media_parameters: Any = None,
    fetch: Fetch | None = None,
) -> list[Item]:
    """The requests of one ``embed`` call. :class:`InvalidRequest` names what cannot be sent."""
    given: list[tuple[str, str, object]] = []
    for kind, field, values in ((wire.IMAGE, "images", images), (wire.AUDIO, "audio", audio)):
        given += [(kind, f"{field}[{i}]", value) for i, value in enumerate(as_list(values, field))]
    common = wire.media_parameter_input(media_parameters)
    items = []
    for kind, field, value in given:
        messages = json_bytes([{"role": "user", "content": [{"type": kind}]}], wire.MESSAGES)
        inputs: dict[str, InputValue] = {
            wire.MESSAGES: [messages],
            kind: [ENCODERS[kind](value, field, fetch)],
        }
        items.append(Item(kind, field, Request(wire.ENCODE_MODEL, uuid.uuid4().hex, {**inputs, **common})))
    return items


def rows_of(item: Item, tensors: Tensors) -> FloatArray:
    """The embedding rows [N, hidden] of an item from the answer to its request."""
    rows = tensors.get(f"{item.kind}_embeds")
    if rows is None or rows.ndim != 2:
        raise ServerError(f"{item.field}: the server sent no {item.kind}_embeds of two dimensions")
    return rows.astype(np.float32, copy=False)


def renamed(item: Item, error: MiniCPMOClientError) -> MiniCPMOClientError:
    """``error`` in the caller's terms: the server saw the only item of its request.

    >>> from minicpmo_client.errors import InvalidRequest
    >>> item = Item("image", "images[3]", Request("encode", "", {}))
    >>> renamed(item, InvalidRequest("image[0]: not an image"))
    InvalidRequest('images[3]: not an image')
    """
    return type(error)(f"{item.field}: {str(error).removeprefix(f'{item.kind}[0]: ')}")


def collect(items: Sequence[Item], rows: Sequence[FloatArray]) -> Embeddings:
    """The items' rows, sorted into images and recordings."""
    pairs = list(zip(items, rows, strict=True))
    return Embeddings(
        images=tuple(array for item, array in pairs if item.kind == wire.IMAGE),
        audio=tuple(array for item, array in pairs if item.kind == wire.AUDIO),
    )

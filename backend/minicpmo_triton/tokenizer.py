"""The checkpoint's tokenizer files, read as data: the tokenizer itself and the chat template.

Text is encoded by the tokenizer *without* its added tokens, so no text can produce one; control tokens
are looked up by name. Splitting first and encoding the pieces is also how the published tokenizer
proceeds, so ids are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer

from minicpmo_triton.errors import CheckpointError, InvalidArgument

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextTokenizer:
    """Encodes text that holds no control token, and knows the control tokens' ids."""

    def __init__(self, tokenizer: Tokenizer, control_ids: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        #: Spelling of every added token -> its id.
        self.control_ids = control_ids

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: Path) -> TextTokenizer:
        """Read ``tokenizer.json`` and the added tokens that ``tokenizer_config.json`` lists.

        Raises :class:`CheckpointError` when a file is missing or malformed.
        """
        definition = read_json(checkpoint_dir / "tokenizer.json")
        added = read_json(checkpoint_dir / "tokenizer_config.json").get("added_tokens_decoder", {})
        try:
            control_ids = {token["content"]: int(token["id"]) for token in definition["added_tokens"]}
            control_ids |= {token["content"]: int(index) for index, token in added.items()}
            definition["added_tokens"] = []
            tokenizer = Tokenizer.from_str(json.dumps(definition))
        except Exception as error:  # tokenizers raises a plain Exception for a malformed definition
            raise CheckpointError(f"{checkpoint_dir / 'tokenizer.json'}: {error}") from error
        for spelling in control_ids:
            # A client's spelling of a token is broken up behind its first character.
            if len(spelling) < 2:
                raise CheckpointError(
                    f"tokenizer.json: added token {spelling!r} is too short to tell from text"
                )
        return cls(tokenizer, control_ids)

    def control_id(self, spelling: str) -> int:
        """Id of a control token; :class:`CheckpointError` when the tokenizer lacks it."""
        if spelling not in self.control_ids:
            raise CheckpointError(f"the checkpoint's tokenizer has no token {spelling}")
        return self.control_ids[spelling]

    def encode(self, texts: Iterable[str]) -> list[NDArray[np.int32]]:
        """Ids of each text, int32; every character is text, whatever it spells."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the checkpoint; :class:`CheckpointError` names the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


class ChatTemplate:
    """Renders messages to a prompt in a sandbox, as transformers does. ``source`` is its text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the checkpoint's chat template: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: Path) -> ChatTemplate:
        """Read ``chat_template.jinja`` or, without it, ``chat_template`` of ``tokenizer_config.json``.

        Raises :class:`CheckpointError` when there is neither.
        """
        config = read_json(checkpoint_dir / "tokenizer_config.json")
        path = checkpoint_dir / "chat_template.jinja"
        source = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
        if not isinstance(source, str):
            raise CheckpointError(f"{checkpoint_dir / 'tokenizer_config.json'} has no chat_template")
        tokens = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name)}
        tokens = {
            name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()
        }
        return cls(source, tokens)

    def render(self, messages: Sequence[Mapping[str, str]], **switches: bool) -> str:
        """The prompt up to where the assistant's answer begins.

        ``messages`` have ``role`` and ``content``. Raises :class:`InvalidArgument` when the template
        refuses them.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
                **switches,
            )
        except TemplateError as error:
            raise InvalidArgument("messages", f"the chat template refuses them: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)

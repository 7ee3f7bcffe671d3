"""The contents of jobs, which a codec, if there is one, encodes for the table and decodes again.

An encoded content is a JSON object with the one key ``$codec``, so that it fits the columns of plain ones:
``{"$codec": ["aes-gcm", "name of the key", "base64"]}``. Plain and encoded rows may stand side by side,
so a plain content of that shape is refused.
"""

import base64
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self
from uuid import UUID

from jsworker.core.aes_gcm import AesGcmCodec, read_keys
from jsworker.core.codec import Codec
from jsworker.core.errors import ContentRefused, InvalidJson, KeyMissing, SettingsError
from jsworker.core.names import shown
from jsworker.core.settings import Settings
from jsworker.core.targets import load_named

_MARK: Final = "$codec"
_BEGINS: Final = f'{{"{_MARK}":'
"""How an encoded content begins as PostgreSQL writes it, and a plain one of its shape as we write it."""
_PARTS: Final = 3
OF_SCHEDULE: Final = "a schedule"
"""The owner to which payloads of schedules, and so of their jobs, are bound, beside the kind."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Encodes and decodes the contents of jobs.

    Attributes:
        codec: encodes the contents; None: contents are stored as they are.
        encoded_only: whether plain contents are refused.
        is_of_settings: whether another process can make the codec from the settings.
    """

    codec: Codec | None = None
    encoded_only: bool = False
    is_of_settings: bool = True

    @classmethod
    def of(cls, settings: Settings, codec: Codec | None = None) -> Self:
        """Return the contents of these settings, or of a codec that is given instead.

        Raises:
            SettingsError: the codec cannot be made, or there is none and plain contents are to be refused.
            InvalidTarget: JSWORKER_CODEC cannot be imported.
        """
        found = _codec_of(settings) if codec is None else codec
        if found is None and settings.encrypted_only:
            raise SettingsError(
                "JSWORKER_ENCRYPTED_ONLY=true must come with JSWORKER_ENCRYPTION_KEYS or JSWORKER_CODEC"
            )
        return cls(found, settings.encrypted_only, codec is None)

    def encode(self, text: str, what: str, kind: str, owner: UUID | str) -> str:
        """Return JSON text as it is to be stored.

        Args:
            text: the JSON text.
            what: the column: payload, result, checkpoint, or ``step`` and its name.
            kind: the job's kind.
            owner: the job's id, or the text that replaces it; see ``owner_of_payload``.

        Raises:
            InvalidJson: there is no codec, and the text would be taken for an encoded content.
            TypeError: the codec names its key by something that is no text.
        """
        if self.codec is None:
            if text.startswith(_BEGINS) and is_encoded_value(json.loads(text)):
                raise InvalidJson(
                    f'{what}: an object with the one key "{_MARK}" is reserved for encoded contents'
                )
            return text
        key, encoded = self.codec.encode(text.encode(), _bound_to(what, kind, owner))
        if not isinstance(key, str):  # ``decode`` would refuse the content
            raise TypeError(f"{type(self.codec).__name__}.encode returned {shown(key)} as the key's name")
        return json.dumps({_MARK: [self.codec.name, key, base64.b64encode(encoded).decode()]})

    def may_be_encoded(self, text: str) -> bool:
        """Return whether a stored text may be encoded, and so is to be given to ``decode``."""
        return self.encoded_only or text.startswith(_BEGINS)

    def decode(self, text: str, what: str, kind: str, owner: UUID | str) -> str:
        """Return the JSON text of a stored text.

        Raises:
            KeyMissing: it is encoded by a codec or with a key that this process does not have.
            ContentRefused: it was changed, or belongs to another job, kind or column; or it is plain, and
                plain contents are refused.
        """
        if not self.may_be_encoded(text):
            return text
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # more digits or levels than Python reads, which no codec writes
            raise ContentRefused(f"{_where(what, kind, owner)}: is no encoded content") from None
        is_plain = not (self.encoded_only or is_encoded_value(value))
        return text if is_plain else self._decode(value, what, kind, owner)

    def decode_value(self, value: Any, what: str, kind: str, owner: UUID | str) -> Any:
        """Return the decoded value of a content that was read as a JSON value; raise as ``decode`` does."""
        if value is None or not (self.encoded_only or is_encoded_value(value)):
            return value
        text = self._decode(value, what, kind, owner)
        with suppress(ValueError, RecursionError):  # the codec may not detect that a content was changed
            return json.loads(text)
        raise ContentRefused(f"{what} of kind {kind}: what is decoded is no JSON")

    def decode_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a job's row by column name with its contents decoded; without a codec, the row as it is."""
        if self.codec is None:
            return row
        kind, job_id = row["kind"], row["id"]
        owner = owner_of_payload(job_id, row["waiting_key"], is_scheduled=row["scheduled_for"] is not None)
        owners = {"payload": owner, "result": job_id, "checkpoint": job_id}
        return row | {name: self.decode_value(row[name], name, kind, who) for name, who in owners.items()}

    def _decode(self, value: Any, what: str, kind: str, owner: UUID | str) -> str:
        where = _where(what, kind, owner)
        if not is_encoded_value(value):
            raise ContentRefused(f"{where}: is not encrypted, and JSWORKER_ENCRYPTED_ONLY=true refuses that")
        parts = value[_MARK]
        if not (
            isinstance(parts, list) and len(parts) == _PARTS and all(isinstance(each, str) for each in parts)
        ):
            raise ContentRefused(f"{where}: is no encoded content")
        codec, key, encoded = parts
        try:
            content = base64.b64decode(encoded, validate=True)
        except ValueError:
            raise ContentRefused(f"{where}: is no encoded content") from None
        if self.codec is None or self.codec.name != codec:
            raise KeyMissing.of(where, f"codec {shown(codec)}")
        try:
            return self.codec.decode(key, content, _bound_to(what, kind, owner)).decode()
        except KeyMissing:
            raise KeyMissing.of(where, f"key {shown(key)} of codec {codec}") from None
        except Exception:  # noqa: BLE001 -- of any codec; its text, or its cause, may hold parts of the content
            why = f"cannot be decoded with key {shown(key)}: it was changed, or belongs to another place"
        raise ContentRefused(f"{where}: {why}")


PLAIN: Final = Contents()


def owner_of_payload(job_id: UUID, waiting_key: str | None, *, is_scheduled: bool) -> UUID | str:
    """Return the owner of a job's payload: its key, if a later call with the key may replace the payload."""
    if waiting_key is not None:
        return f"unique key {waiting_key}"
    return OF_SCHEDULE if is_scheduled else job_id


def is_encoded_value(value: Any) -> bool:
    """Return whether a stored JSON value is an encoded content."""
    return isinstance(value, dict) and len(value) == 1 and _MARK in value


def key_of_content(value: Any) -> str | None:
    """Return codec and key of an encoded content, in words, or None for a plain content."""
    if not is_encoded_value(value):
        return None
    parts = value[_MARK]
    return " ".join(map(str, parts[:2])) if isinstance(parts, list) else "?"


def _where(what: str, kind: str, owner: UUID | str) -> str:
    return f"{what} of kind {kind}, of {owner if isinstance(owner, str) else f'job {owner}'}"


def _bound_to(what: str, kind: str, owner: UUID | str) -> bytes:
    return json.dumps(["jsworker", what, kind, str(owner)]).encode()


def _codec_of(settings: Settings) -> Codec | None:
    if settings.codec is not None:
        found = load_named(settings.codec, "NAME", "my_codecs:MyCodec")
        codec = found() if isinstance(found, type) else found
        if not isinstance(codec, Codec):
            raise SettingsError(
                f"JSWORKER_CODEC={shown(settings.codec)} is no Codec: it is of type {type(codec).__name__}"
            )
        return codec
    if settings.encryption_keys is None:
        return None
    return AesGcmCodec(read_keys(settings.encryption_keys.get_secret_value()))

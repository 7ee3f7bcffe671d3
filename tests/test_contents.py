"""Contents and their codec: what is encoded comes back only where it belongs, and no key is ever shown."""

import base64
import json
import sys
from typing import Any
from uuid import UUID, uuid4

import pytest

from jsworker.core import strict_json
from jsworker.core.aes_gcm import AesGcmCodec, read_keys
from jsworker.core.codec import Codec
from jsworker.core.contents import Contents, is_encoded_value, key_of_content
from jsworker.core.errors import ContentRefused, InvalidJson, InvalidTarget, KeyMissing, SettingsError
from jsworker.core.settings import Settings, load_settings

OLD, NEW = (bytes(range(start, start + 32)) for start in (100, 200))
JOB = UUID("01890000-0000-7000-8000-000000000001")
WHERE: Any = ("payload", "count-words", JOB)
TEXT = '{"text":"top secret ✓"}'


class Reverse(Codec):
    """A codec of one's own, by module and name."""

    name = "reverse"

    def encode(self, content: bytes, bound_to: bytes) -> tuple[str, bytes]:
        return "k", bound_to + content[::-1]

    def decode(self, key: str, encoded: bytes, bound_to: bytes) -> bytes:
        if key != "k":
            raise KeyMissing
        if not encoded.startswith(bound_to):
            raise ValueError(f"top secret: {encoded!r}")
        return encoded[len(bound_to) :][::-1]


def text_of_keys(**keys: bytes) -> str:
    return ",".join(f"{name}:{base64.b64encode(key).decode()}" for name, key in keys.items())


def contents(**keys: bytes) -> Contents:
    return Contents(AesGcmCodec(keys))


def as_stored(text: str) -> str:
    """Write JSON text as PostgreSQL writes jsonb."""
    return json.dumps(json.loads(text), ensure_ascii=False)


def test_what_was_encoded_comes_back_and_shows_nothing() -> None:
    stored = as_stored(contents(new=NEW).encode(TEXT, *WHERE))
    assert "secret" not in stored
    assert contents(new=NEW).may_be_encoded(stored)
    assert contents(new=NEW).decode(stored, *WHERE) == TEXT
    assert contents(new=NEW).decode_value(json.loads(stored), *WHERE) == json.loads(TEXT)
    assert key_of_content(json.loads(stored)) == "aes-gcm new"


def test_equal_contents_look_different() -> None:
    both = contents(new=NEW)
    assert both.encode(TEXT, *WHERE) != both.encode(TEXT, *WHERE)


def test_the_first_key_encodes_and_all_decode() -> None:
    before = as_stored(contents(old=OLD).encode(TEXT, *WHERE))
    rotated = contents(new=NEW, old=OLD)
    assert rotated.decode(before, *WHERE) == TEXT
    assert key_of_content(json.loads(rotated.encode(TEXT, *WHERE))) == "aes-gcm new"


@pytest.mark.parametrize(
    "other",
    [
        ("result", "count-words", JOB),
        ("payload", "other-kind", JOB),
        ("payload", "count-words", uuid4()),
        ("payload", "count-words", "a schedule"),
    ],
    ids=["column", "kind", "job", "owner"],
)
def test_elsewhere_it_is_refused(other: Any) -> None:
    stored = contents(new=NEW).encode(TEXT, *WHERE)
    with pytest.raises(ContentRefused, match="it was changed, or belongs to another place") as refused:
        contents(new=NEW).decode(as_stored(stored), *other)
    assert refused.value.__context__ is None


def changed(what: str) -> Any:
    codec, key, data = json.loads(contents(old=OLD).encode(TEXT, *WHERE))["$codec"]
    raw = bytearray(base64.b64decode(data))
    match what:
        case "nonce":
            raw[0] ^= 1
        case "ciphertext":
            raw[14] ^= 1
        case "tag":
            raw[-1] ^= 1
        case "cut":
            del raw[5:]
        case "key":
            key = "new"
        case "base64":
            return {"$codec": [codec, key, "!" + data]}
        case "parts":
            return {"$codec": [codec, key]}
        case "types":
            return {"$codec": [codec, key, 7]}
        case "shape":
            return {"$codec": data}
    return {"$codec": [codec, key, base64.b64encode(raw).decode()]}


@pytest.mark.parametrize(
    "what", ["nonce", "ciphertext", "tag", "cut", "key", "base64", "parts", "types", "shape"]
)
def test_whatever_is_changed_is_refused(what: str) -> None:
    with pytest.raises(ContentRefused, match=f"^payload of kind count-words, of job {JOB}: ") as refused:
        contents(new=NEW, old=OLD).decode_value(changed(what), *WHERE)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("text", ["no json", "[" * 100_000])
def test_what_a_codec_decodes_to_no_json_is_refused_without_a_word_of_it(text: str) -> None:
    own = Contents(Reverse())
    stored = json.loads(own.encode(text, *WHERE))
    with pytest.raises(ContentRefused) as refused:
        own.decode_value(stored, *WHERE)
    assert text not in str(refused.value)
    assert refused.value.__cause__ is refused.value.__context__ is None


@pytest.mark.parametrize(
    ("reader", "says"),
    [
        (contents(new=NEW), "key 'old' of codec aes-gcm"),
        (Contents(), "codec 'aes-gcm'"),
        (Contents(Reverse()), "codec 'aes-gcm'"),
    ],
    ids=["other keys", "no codec", "another codec"],
)
def test_a_key_that_is_not_here_is_no_fault_of_the_content(reader: Contents, says: str) -> None:
    stored = as_stored(contents(old=OLD).encode(TEXT, *WHERE))
    with pytest.raises(KeyMissing, match="which is not here") as missing:
        reader.decode(stored, *WHERE)
    assert missing.value.what == says


@pytest.mark.parametrize(
    "value", [{"text": "plain"}, {"$codec": 1, "more": 2}, [{"$codec": []}], "$codec", None]
)
def test_plain_contents_pass_unless_they_are_refused(value: Any) -> None:
    assert not is_encoded_value(value)
    text = json.dumps(value)
    assert contents(new=NEW).decode(text, *WHERE) == text
    assert Contents().decode(text, *WHERE) == text
    assert Contents().encode(text, *WHERE) == text
    strict = Contents(AesGcmCodec({"new": NEW}), encoded_only=True)
    with pytest.raises(
        ContentRefused, match="is not encrypted, and JSWORKER_ENCRYPTED_ONLY=true refuses that"
    ):
        strict.decode(text, *WHERE)


@pytest.mark.parametrize("value", ["1" * 5_000, "[" * 100_000], ids=["long", "deep"])
def test_what_python_does_not_read_is_refused(value: str) -> None:
    for reader in (Contents(encoded_only=True), contents(new=NEW), Contents()):
        text = value if reader.encoded_only else f'{{"$codec": {value}'
        with pytest.raises(ContentRefused, match=f"^payload of kind count-words, of job {JOB}: ") as refused:
            reader.decode(text, *WHERE)
        assert value[:10] not in str(refused.value)


def test_a_codec_must_name_its_key_by_text() -> None:
    class Numbered(Reverse):
        def encode(self, content: bytes, bound_to: bytes) -> tuple[str, bytes]:
            return 7, content + bound_to  # type: ignore[return-value]

    with pytest.raises(TypeError, match=r"^Numbered\.encode returned 7 as the key's name$"):
        Contents(Numbered()).encode(TEXT, *WHERE)


@pytest.mark.parametrize("value", [{"$codec": ["a", "b", "c"]}, {"$codec": None}])
def test_a_plain_content_that_would_be_taken_for_an_encoded_one_is_refused(value: Any) -> None:
    text = strict_json.dumps(value)
    with pytest.raises(InvalidJson, match=r'^payload: an object with the one key "\$codec" is reserved'):
        Contents().encode(text, *WHERE)
    both = contents(new=NEW)
    assert both.decode(as_stored(both.encode(text, *WHERE)), *WHERE) == text


def test_a_codec_of_ones_own_is_found_by_its_name() -> None:
    settings = Settings(database_url="postgresql://", codec=f"{__name__}:Reverse")
    found = Contents.of(settings)
    stored = as_stored(found.encode(TEXT, *WHERE))
    assert found.decode(stored, *WHERE) == TEXT
    assert found.is_of_settings
    with pytest.raises(ContentRefused) as refused:
        found.decode(stored, "result", "count-words", JOB)
    assert "secret" not in str(refused.value)
    given = Contents.of(settings, AesGcmCodec({"new": NEW}))
    assert (given.codec.name if given.codec else None, given.is_of_settings) == ("aes-gcm", False)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"codec": f"{__name__}:JOB"}, SettingsError, "is no Codec: it is of type UUID"),
        ({"codec": "no_such_module:X"}, InvalidTarget, "no_such_module"),
        (
            {"encrypted_only": True},
            SettingsError,
            "must come with JSWORKER_ENCRYPTION_KEYS or JSWORKER_CODEC",
        ),
    ],
)
def test_a_codec_that_cannot_be_made_is_refused_at_the_start(
    changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Contents.of(Settings(database_url="postgresql://", **changes))


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(SettingsError, match=r"pip install 'jsworker\[encryption\]'"):
        AesGcmCodec({"new": NEW})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "c4n4ry",
        "a:c4n4ry",
        f"a:{base64.b64encode(b'c4n4ry').decode()}",
        f"{text_of_keys(a=NEW)},{text_of_keys(a=OLD)}",
        f"c4n4ry key:{base64.b64encode(NEW).decode()}",
        f"a:{base64.b64encode(NEW).decode()},",
    ],
)
def test_keys_that_cannot_be_are_refused_without_a_part_of_them(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="must read NAME:KEY"):
        read_keys(text)
    monkeypatch.setenv("JSWORKER_DATABASE_URL", "postgresql://")
    if not text:
        return  # as if it were not set
    with pytest.raises(SettingsError, match=r"^JSWORKER_ENCRYPTION_KEYS must read ") as refused:
        load_settings(encryption_keys=text)
    shown = str(refused.value) + repr(refused.value.__context__) + repr(refused.value.__cause__)
    assert not any(part in shown for part in ("c4n4ry", base64.b64encode(NEW).decode()[:8]))


def test_nothing_that_prints_settings_or_codec_shows_a_key(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text(f"{text_of_keys(new=NEW, old=OLD)}\n")
    monkeypatch.setenv("JSWORKER_DATABASE_URL", "postgresql://")
    monkeypatch.setenv("JSWORKER_ENCRYPTION_KEYS_FILE", str(tmp_path / "keys"))
    settings = load_settings()
    found = Contents.of(settings)
    shown = f"{settings!r} {settings} {settings.model_dump_json()} {settings.model_dump()} {found!r}"
    assert "AesGcmCodec(new, old)" in shown
    for key in (NEW, OLD):
        assert base64.b64encode(key).decode()[:12] not in shown


def test_keys_and_a_codec_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", "postgresql://")
    with pytest.raises(
        SettingsError, match="JSWORKER_ENCRYPTION_KEYS and JSWORKER_CODEC must not be set together"
    ):
        load_settings(encryption_keys=text_of_keys(new=NEW), codec="a:b")

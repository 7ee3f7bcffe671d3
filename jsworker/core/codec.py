"""A codec: bytes in, bytes out, by a key that has a name."""

from abc import ABC, abstractmethod
from typing import ClassVar


class Codec(ABC):
    """Encodes payloads, results, checkpoints and the results of steps before they are stored. Subclass it.

    It is called on the event loop, and from threads too, so it must not wait: a key management service is
    asked for data keys beforehand.

    Attributes:
        name: stands beside whatever was encoded; another one for each codec and each version of its form.
    """

    name: ClassVar[str]

    @abstractmethod
    def encode(self, content: bytes, bound_to: bytes) -> tuple[str, bytes]:
        """Return the name of the key, which is stored as it is, and the encoded content.

        Args:
            content: UTF-8 text of a JSON value.
            bound_to: the job, its kind and the column. ``decode`` is to refuse it with any other one: else a
                content could be moved to another row.
        """

    @abstractmethod
    def decode(self, key: str, encoded: bytes, bound_to: bytes) -> bytes:
        """Return what was encoded.

        Raises:
            KeyMissing: this codec does not have the key; the job waits until a worker has it.
            Exception: any other one: the content was changed, or moved; the job fails.
        """

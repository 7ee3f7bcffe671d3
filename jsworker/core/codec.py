"""The base class of codecs, which encode and decode bytes with named keys."""

from abc import ABC, abstractmethod
from typing import ClassVar


class Codec(ABC):
    """Encodes payloads, results, checkpoints and the results of steps before they are stored. Subclass it.

    It is called on the event loop, and from threads too, so it must not wait: ask a key management service
    for data keys beforehand.

    Attributes:
        name: is stored with each encoded content; different for each codec and each version of its format.
    """

    name: ClassVar[str]

    @abstractmethod
    def encode(self, content: bytes, bound_to: bytes) -> tuple[str, bytes]:
        """Return the name of the key, which is stored as it is, and the encoded content.

        Args:
            content: UTF-8 text of a JSON value.
            bound_to: the job, its kind and the column. ``decode`` must refuse the content if its ``bound_to``
                differs: else a content could be moved to another row.

        Raises:
            Exception: the content is not stored; in a job, the attempt fails, with KeyMissing too.
        """

    @abstractmethod
    def decode(self, key: str, encoded: bytes, bound_to: bytes) -> bytes:
        """Return the content that was encoded.

        Raises:
            KeyMissing: this codec does not have the key; the job waits until a worker has it.
            Exception: any other error means that the content was changed or moved; the job fails.
        """

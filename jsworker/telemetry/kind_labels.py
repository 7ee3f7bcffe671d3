"""The kinds that figures name: few enough, whatever kinds producers invent."""

from jsworker.telemetry.worker_status import MOST_KINDS, OTHER_KINDS


class KindLabels:
    """Names the kinds that come first; later ones are counted together. Safe to use from several threads."""

    def __init__(self, most: int = MOST_KINDS) -> None:
        """Name no kind yet.

        Args:
            most: kinds that get a label of their own.
        """
        self._most = most
        self._named: dict[str, str] = {}

    def label(self, kind: str) -> str:
        """Return what a kind is called in figures."""
        label = self._named.get(kind)
        if label is not None:
            return label
        if len(self._named) >= self._most:
            return OTHER_KINDS
        return self._named.setdefault(kind, kind)

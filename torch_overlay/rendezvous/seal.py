"""`Seal`: signs what ranks of a place say."""

from __future__ import annotations

import hashlib
import hmac


class Seal:
    """Signs what a rank says with a key, so that a process without the key can't speak, nor repeat what it has heard.

    Args:
        key: known to all ranks. It is never sent.
        session: made of random numbers of all ranks, so that a signature of another session doesn't fit.
    """

    def __init__(self, key: bytes, session: str) -> None:
        self._key, self._session = key, session

    def within(self, meeting: str) -> Seal:
        """Return the seal of one meeting of this session."""
        return Seal(self._key, f"{self._session} {meeting}")

    def of(self, *words: str) -> str:
        """Sign words. Returns the signature, in hexadecimal."""
        return hmac.new(self._key, "\0".join((self._session, *words)).encode(), hashlib.sha256).hexdigest()

    def fits(self, seal: str, *words: str) -> bool:
        """True if `seal` is the signature of these words."""
        return hmac.compare_digest(seal, self.of(*words))

"""A cache of composed profiles that is bounded by their size: a thousand candidates must fit into memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, ParamSpec

from accounting.profile import DiscretisedProfile, PrivacyProfile

P = ParamSpec("P")

_OVERHEAD = 1_000  # bytes, about, of a key and a profile without its arrays


class ProfileCache(Generic[P]):
    """A function to profiles that remembers its latest results, as many as fit.

    Safe to call from several threads, which may compute the same profile at the same time.

    Args:
        function: of hashable positional arguments; the same arguments must give the same profile.
        most_bytes: of all profiles held together; the one computed last is held whatever its size.
    """

    def __init__(self, function: Callable[P, PrivacyProfile], most_bytes: int) -> None:
        self._function = function
        self._most_bytes = most_bytes
        self._held: OrderedDict[Hashable, PrivacyProfile] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> PrivacyProfile:
        key = (args, tuple(sorted(kwargs.items())))
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        profile = self._function(*args, **kwargs)
        with self._lock:
            if key not in self._held:
                self._held[key] = profile
                self._bytes += size_of(profile)
            while self._bytes > self._most_bytes and len(self._held) > 1:
                self._bytes -= size_of(self._held.popitem(last=False)[1])
        return profile

    def cache_clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
            self._bytes = 0


def cached_by_size(most_bytes: int) -> Callable[[Callable[P, PrivacyProfile]], ProfileCache[P]]:
    """Decorate a function to profiles with a `ProfileCache`."""
    return lambda function: ProfileCache(function, most_bytes)


def size_of(profile: PrivacyProfile) -> int:
    """Bytes held by a profile, about; an array that serves both directions counts once."""
    if not isinstance(profile, DiscretisedProfile):
        return _OVERHEAD
    arrays = {id(values): values.nbytes for values in profile.on_grid}
    return _OVERHEAD + sum(arrays.values())

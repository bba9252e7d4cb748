"""What is remembered of tensors, and by what they are known again.

- Graphs of ``edge_index`` and of sparse matrices (:data:`cache`): by each index tensor as it was (:class:`Seen`), the sizes and the
  direction. Let go with the tensor, or by the budget.
- The edges that an adjacency matrix lists, which of them are loops and whether each is there once (:data:`cache`,
  :mod:`gnnfast.pyg.matrices`): by the matrix and its index tensors as they were; nothing of its values. Let go with it. Which
  matrices a GPU met (:data:`gnnfast.pyg.sparse._met`): by the matrix; only decides who multiplies.
- Normalised weights, GCN's and ChebConv's (:data:`cache`, :mod:`gnnfast.pyg.norm`): by ``edge_index`` and constant weights as they
  were, the arguments and what else they depend on (default dtype, deterministic algorithms). Let go likewise. For layers that only
  sum over GCN's and let nobody see them, with the graph of their edges, under a key of their own: on a GPU their loops are listed
  otherwise.
- Measured and compressed features (:data:`cache`, :mod:`gnnfast.features`): by constant features as they were; likewise.
- Which features a layer has used, and which ``edge_index`` or edge weights were met before (:class:`Sightings`): by the tensor and
  its version, layer and use; the last 256 or more. Only says that they are worth looking at, which looks at them as they are then.
- By how much aggregations over an ``edge_index`` on a GPU were slower for not being converted, before there was a graph of it
  (:class:`Amounts`): by the tensor and its version; the last 1,024 or more. Only says when it is worth a format.
- Which layers have met a graph twice (:data:`gnnfast.pyg.small.returning`): by the layer, let go with it, or after eight graphs
  that are new. Only says whether a first look is worth it.
- An ``edge_index`` turned around, without or with all self loops, and several of them side by side (:data:`cache`,
  :mod:`gnnfast.pyg.loops`): by each ``edge_index`` as it was, and the number of nodes or what ids are moved by. Users get copies.
- The graph that carries edge features to where edges end (:data:`cache`, :mod:`gnnfast.pyg.adjacency`): as a graph, with it.
- The graphs of edges with types (:data:`cache`, :mod:`gnnfast.dispatch.relations`): by ``edge_index``, or the key of DGL's index,
  the types and, if nodes are given by numbers, these, as they were, and all sizes. Nobody else sees them.
- What multiplies the members of hyperedges in their means, and how many hyperedges there are (:data:`cache`,
  :mod:`gnnfast.pyg.hypergraph`): by ``hyperedge_index`` and constant weights as they were, sizes, dtype and deterministic
  algorithms. Nobody else sees them.
- Nodes in order of degree (:data:`cache`, :mod:`gnnfast.pyg.mf`): by ``edge_index`` as it was, the number of nodes, the greatest
  degree and the direction. Nobody else sees them.
- The graph of edges with a loop at each node (:data:`cache`, :mod:`gnnfast.pyg.loops`): by the ``edge_index`` as it was, and
  the numbers of nodes; with it, which edges are no self loops. Nobody else sees them.
- Weights in slot order (``graph.edge_values``): by graph and constant weights as they were. Let go with the weights; the last 4.
- Which kernel the selector chose (``Edges.choices``): by all that it is chosen by, while the regret is below the limit it gave.
- Draws, schedules and timed options (``graph.draws``, ``graph.plan``), inverse permutations and degrees
  (``ops.convert.derived``): by the graph's own arrays, which nobody else holds and nothing writes. Let go with the graph.
- The structure of DGL's graphs (:data:`cache`, :mod:`gnnfast.dgl.structure`): by the ``HeteroGraphIndex``, which is immutable, its
  relations and its reverse. Let go with it, or by the budget. Its sizes (``Known``): likewise, in its own dictionary; and there, of
  a graph that is on a GPU, its edges and degrees (:class:`gnnfast.dgl.bridge.index.Edges`).
- Normalisation of a DGL graph by its degrees (:data:`cache`, :mod:`gnnfast.dgl.layers`): by the same. Whether it has
  nodes without in-edges: in its ``Known``.
- Which tensor a handed-out copy equals (:meth:`Cache.add_copy`): by the copy as it was. Let go with it.
- Which tensors were seen to require a gradient (:func:`note_variable`): by the tensor, let go with it.
- Code of patched functions (``patching._injected``): by function and the code object that it had.
- Parts and options of a layer (``pyg.layers._parts``): by the module, whose parts, options, hooks and functions are compared again.
  Let go with it.
- What modules compute, and which functions are PyG's (:mod:`gnnfast.pyg.known`): by functions and their code objects. What a
  class computed last (``verdict.served``) and why it is refused (``verdict.refused``): by the class; they can only lead to PyG's
  own path.
- A captured step (:mod:`gnnfast.captured`): by what the values that it found are known by, shapes of arguments, options of
  optimisers, and the addresses of parameters and buffers.
- Whatever a captured CUDA graph reads (:func:`keep_if_captured`): for ever, as its replays cannot be seen.

*As it was* is everything that can be noticed without reading the elements: version counter, dtype, shape, strides, address and
storage. *Constant* excludes what changes without
any of these: optimisers write into parameters unseen, so of a tensor that ever required a gradient nothing is derived and kept
(:func:`is_constant`). Nothing that users can reach is shared: what they get is theirs alone.

Buffers that a compiler makes are written into without a sign: in compiled code only its inputs are known by identity
(:mod:`gnnfast.pyg.compiled`).

What cannot be noticed, and README says so: writes into the memory of a constant tensor that go past its version counter, which are
those through ``.data``, through a NumPy array or DLPack capsule that shares it, and by an optimiser through the parameter that a
tensor was detached from.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gnnfast.config import settings
from gnnfast.reporting import has_account
from gnnfast.stream import is_capturing

_STRIDED = torch.strided


class Seen:
    """A tensor as it was. ``gone`` is called when it dies."""

    __slots__ = ("_address", "_dtype", "_place", "_plain", "_ref", "_shape", "_storage", "_stride", "_version")

    def __init__(self, t: Tensor, gone: Callable[[], None] | None = None) -> None:
        self._ref, self._version = weakref.ref(t, None if gone is None else lambda _: gone()), t._version
        self._plain = type(t) is Tensor and t.layout is _STRIDED  # subclasses and sparse tensors hold their data elsewhere
        if self._plain:
            self._dtype, self._shape, self._stride, self._address = t.dtype, t.shape, t.stride(), t.data_ptr()
            # Does not keep the memory, but the address of the storage from being used for another one.
            self._storage = StorageWeakRef(t.untyped_storage())
            self._place = self._storage.cdata

    def still(self, t: Tensor) -> bool:
        """Whether ``t`` is the same object, unchanged."""
        return self._ref() is t and self.unchanged(t)

    def holds(self) -> bool:
        """Whether the tensor lives and is unchanged."""
        t = self._ref()
        return t is not None and self.unchanged(t)

    def unchanged(self, t: Tensor) -> bool:
        """Whether ``t`` has the same memory, unchanged: for parts of a sparse tensor, which are new objects whenever asked for."""
        return t._version == self._version and (
            not self._plain
            or (
                t.data_ptr() == self._address
                and t.dtype is self._dtype
                and t.shape == self._shape
                and t.stride() == self._stride
                and t.untyped_storage()._cdata == self._place
            )
        )


class _Watching(threading.local):
    seen: list[Seen] | None = None


_watching = _Watching()


@contextlib.contextmanager
def watching() -> Iterator[list[Seen]]:
    """Collects by what tensors, as they were, values are found in this thread meanwhile: what is made of the values holds as long
    as these do."""
    found: list[Seen] = []
    _watching.seen = found
    try:
        yield found
    finally:
        _watching.seen = None


def is_watching() -> bool:
    """Whether somebody collects (:func:`watching`)."""
    return _watching.seen is not None


def found_by(*seen: Seen) -> None:
    """Called where a kept value is found by tensors as they were."""
    if _watching.seen is not None:
        _watching.seen += seen


_variables: dict[int, weakref.ref[Tensor]] = {}


def is_constant(t: Tensor) -> bool:
    """Whether values derived from a tensor may be kept: it is no parameter, requires no gradient, never did where it was seen, and
    is no view of a tensor that does."""
    base = t if t._base is None else t._base
    if base.requires_grad or t.requires_grad:
        note_variable(t)
        return False
    return id(base) not in _variables and type(base) is Tensor and not t.is_inference()


def note_variable(t: Tensor) -> None:
    """Remembers that a tensor, or the one it is a view of, required a gradient: an optimiser may write into it."""
    base = t if t._base is None else t._base
    key = id(base)
    if type(base) is Tensor and base.is_leaf and key not in _variables:  # parameters are never constant anyway
        _variables[key] = weakref.ref(base, lambda _: _variables.pop(key, None))


_captured: dict[int, Any] = {}


def keep_if_captured(value: object) -> None:
    """Called with what a CUDA kernel is about to read: a CUDA graph that is being captured reads it in each replay, so it must not
    be let go with the tensor it was made from."""
    if not torch.compiler.is_compiling() and is_capturing():
        _captured[id(value)] = value


def _nobody() -> None:
    return None


_NOTHING = contextlib.nullcontext()


def usable_later() -> contextlib.AbstractContextManager[None]:
    """Within it tensors are made that are kept: those made under inference_mode could not be saved for a backward pass."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING  # type: ignore[return-value]


class Held:
    """A value that grows while it is kept: ``nbytes`` is always up to date, and ``account`` (what holds it, at last the cache) is
    told of each change, so that nobody has to look at all values to know what they take."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._account: Callable[[], Any] = _nobody
        self.entries = 0  # of the cache

    @property
    def held(self) -> Held:
        """What tells an account: of a graph, its edges."""
        return self

    @property
    def account(self) -> Any:
        """What holds the value, or ``None``. Known weakly: a value must die with its last user, not when cycles are collected."""
        return self._account()

    @account.setter
    def account(self, account: Any) -> None:
        self._account = _nobody if account is None else weakref.ref(account)

    def grew(self, nbytes: int) -> None:
        """Called with what has been made; negative for what has been dropped."""
        self.nbytes += nbytes
        account = self._account()
        if account is not None:
            account.grew(nbytes)


class _Entry(NamedTuple):
    seen: tuple[Seen, ...]
    parts: tuple[Seen, ...]
    value: Any


class Cache:
    """Values found again by tensors: an entry holds while each of them lives and is as it was.

    The least recently used entries are dropped when the bytes of all values exceed the budget. Every change takes constant time.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.RLock()
        self.hits = self.misses = self.evictions = 0
        self.nbytes = 0  # of the values
        self._ordered = False  # whether entries are kept in the order of their use: nobody asks for it while values take little

    def find(self, tensors: tuple[Tensor, ...], key: Hashable, parts: tuple[Tensor, ...] = ()) -> Any:
        """The value for these tensors, their ``parts`` and ``key``, or ``None``."""
        full_key = (*map(id, tensors), key)
        entry = self._entries.get(full_key)
        if entry is None:
            return None
        for seen, t in zip(entry.seen, tensors):
            if not seen.still(t):
                return None
        for seen, t in zip(entry.parts, parts):
            if not seen.unchanged(t):
                return None
        if _watching.seen is not None:
            _watching.seen += entry.seen
        if self._ordered:
            with contextlib.suppress(KeyError):  # dropped by another thread; the value is good all the same
                self._entries.move_to_end(full_key)
        return entry.value

    def get(self, tensors: tuple[Tensor, ...], key: Hashable, build: Callable[[], Any], parts: tuple[Tensor, ...] = ()) -> Any:
        """The value for these tensors and ``key``, built if there is none. Not kept for inference tensors, which have no version
        counter to show a change."""
        value = self.find(tensors, key, parts)
        if value is not None:
            self.hits += 1
            return value
        self.misses += 1
        value = build()
        self._put(tensors, key, value, parts)
        return value

    def add(self, tensors: tuple[Tensor, ...], key: Hashable, value: Any) -> None:
        """Keeps a ``value`` that was not found and has been built, as :meth:`get` does."""
        self.misses += 1
        self._put(tensors, key, value, ())

    def _put(self, tensors: tuple[Tensor, ...], key: Hashable, value: Any, parts: tuple[Tensor, ...]) -> None:
        for t in tensors:
            if t.is_inference():
                return
        full_key = (*map(id, tensors), key)
        myself = weakref.ref(self)  # a cache must not live as long as the tensors

        def gone() -> None:
            cache = myself()
            if cache is not None:
                cache._drop(full_key)

        with self._lock:
            if full_key in self._entries:
                self._drop(full_key)
            self._entries[full_key] = _Entry(tuple([Seen(t, gone) for t in tensors]), tuple(map(Seen, parts)), value)
            self._count(value, 1)

    def add_copy(self, copy: Tensor, origin: Tensor) -> None:
        """Remembers that a tensor that is handed out equals one that is kept, until either changes."""
        self.get((copy,), "copy", lambda: _Origin(origin))

    def origin(self, copy: Tensor) -> Tensor | None:
        """The tensor that one equals, if it is a copy that has not been changed."""
        found = self.find((copy,), "copy")
        return None if found is None else found.tensor

    def _drop(self, full_key: Hashable) -> None:
        with self._lock:
            entry = self._entries.pop(full_key, None)
            if entry is not None:
                self._count(entry.value, -1)

    def _count(self, value: Any, sign: int) -> None:
        """A value has got one entry more, or less."""
        held = getattr(value, "held", None)
        if held is not None:
            held.entries += sign
            if held.entries > (sign > 0):
                return  # counted by another entry
            held.account = self if sign > 0 else None
        self.grew(sign * nbytes_of(value if held is None else held))

    def grew(self, nbytes: int) -> None:
        """Called when a value has grown: drops old entries while all exceed the budget."""
        if not nbytes:
            return
        with self._lock:
            self.nbytes += nbytes
            if nbytes < 0:
                return
            budget = self.budget()
            self._ordered = self._ordered or self.nbytes > budget // 4
            while len(self._entries) > 1 and self.nbytes > budget:
                self._drop(next(iter(self._entries)))
                self.evictions += 1

    def budget(self) -> int:
        """Bytes the values may take: ``GNNFAST_CACHE_MB``, else a quarter of the memory of the device in use."""
        megabytes = settings().cache_mb
        if megabytes is not None:
            return megabytes << 20
        if torch.cuda.is_initialized():
            return _device_memory(torch._C._cuda_getDevice()) // 4  # at once: each graph that is new asks
        return _host_memory() // 4

    @property
    def values(self) -> list[Any]:
        """The values, each once."""
        return list({id(entry.value): entry.value for entry in list(self._entries.values())}.values())

    @property
    def schedule_nbytes(self) -> int:
        """Of :attr:`nbytes`, those of the schedules of CUDA graphs."""
        return sum(getattr(v, "format_schedule_nbytes", 0) + getattr(v, "schedule_nbytes", 0) for v in self.values)

    def account(self) -> dict[str, int]:
        """What :func:`gnnfast.report` shows of it."""
        return {
            "entries": len(self),
            "bytes": self.nbytes,
            "schedule bytes": self.schedule_nbytes,
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
        }

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            while self._entries:
                self._drop(next(iter(self._entries)))


class Sightings:
    """Which tensors were met before, as they were then. Only says that something may be worth remembering."""

    MOST = 256  # met since the older ones were forgotten: a tensor that is met again among fewer is known

    def __init__(self) -> None:
        self._met: dict[Hashable, tuple[weakref.ref[Tensor], int]] = {}
        self._older: dict[Hashable, tuple[weakref.ref[Tensor], int]] = {}

    def again(self, t: Tensor, *key: Hashable) -> bool:
        """Whether the tensor was met before with that ``key``, unchanged; now it was."""
        if t.is_inference():
            return False  # it has no version counter
        full_key = (id(t), *key)
        met = self._met.get(full_key)
        if met is not None and met[0]() is t and met[1] == t._version:
            return True
        older = self._older.get(full_key)
        if len(self._met) >= self.MOST:
            self._met, self._older = {}, self._met
        self._met[full_key] = weakref.ref(t), t._version
        return older is not None and older[0]() is t and older[1] == t._version


class Amounts:
    """An amount for each of the tensors for which one was set last, as they were then; of others 0."""

    MOST = 1024  # that were set since the older ones were forgotten

    def __init__(self) -> None:
        self._set: dict[int, tuple[weakref.ref[Tensor], int, float]] = {}
        self._older: dict[int, tuple[weakref.ref[Tensor], int, float]] = {}

    def of(self, t: Tensor) -> float:
        """The amount of a tensor."""
        key = id(t)
        found = self._set.get(key) or self._older.get(key)
        return found[2] if found is not None and found[0]() is t and found[1] == t._version else 0.0

    def set(self, t: Tensor, amount: float) -> None:
        """Sets it."""
        if len(self._set) >= self.MOST:
            self._set, self._older = {}, self._set
        self._set[id(t)] = weakref.ref(t), t._version, amount


class _Origin:
    """A tensor whose bytes count where it is kept."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def nbytes_of(value: Any) -> int:
    """Bytes of what has ``nbytes`` (a graph, features, a tensor), or of a tuple of such."""
    if isinstance(value, tuple):
        return sum(map(nbytes_of, value))
    return getattr(value, "nbytes", 0)


@functools.cache
def _device_memory(device: int) -> int:
    return torch.cuda.get_device_properties(device).total_memory


@functools.cache
def _host_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


cache = Cache()
has_account(cache.account)

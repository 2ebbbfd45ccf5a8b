"""Runs Gluon kernels on the CPU to check their results and their synchronisation.

Triton interprets its own language but not Gluon. Here a kernel's Python source runs against
stand-ins for the language: a tensor is a torch tensor whatever its layout, a partition of warps is
a thread, and asynchronous operations finish as late as they may on the GPU:

- A copy clears its target at once (NaN, or an absurd index) and lands when it is waited for, or
  some time before its barrier flips.
- A product reads its operands when it is issued and again when it is waited for; a difference is
  an error. Nothing can be computed from a product before it was waited for.
- Shared memory starts as NaN. Loads and stores outside their tensor are errors.
- A barrier that is never reached, or reached out of turn, is an error after `PATIENCE_S`.

Layouts, bank conflicts, fences and races between the threads of one partition are not checked.
"""

import operator
import random
import threading
import time
from collections import deque
from types import FunctionType, ModuleType, SimpleNamespace

import torch

PATIENCE_S = 20.0
ABSURD = 1 << 28
_here = threading.local()


class Value:
    """A tensor in registers; `layout` is carried along and has no effect."""

    def __init__(self, data, layout=None):
        self.data = data if isinstance(data, torch.Tensor) else torch.tensor(data)
        self.shape = list(self.data.shape)
        self.type = SimpleNamespace(layout=layout, shape=self.shape)

    def to(self, dtype):
        return Value(self.data.to(dtype), self.type.layout)

    def __bool__(self):
        return bool(self.data)

    def __index__(self):
        return int(self.data)


def _raw(x):
    return x.data if isinstance(x, Value) else x


def _operator(function, swapped=False):
    def apply(a, b):
        if isinstance(b, Pointer):
            return NotImplemented
        return Value(function(*((_raw(b), _raw(a)) if swapped else (_raw(a), _raw(b)))))

    return apply


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "lshift", "rshift")
for _name in _ARITHMETIC:
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(Value, f"__{_name}__", _operator(_function))
    setattr(Value, f"__r{_name}__", _operator(_function, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(getattr(operator, _name)))


class Pointer:
    """Pointers into a contiguous tensor."""

    def __init__(self, tensor, offset=0):
        assert tensor.is_contiguous()
        self.flat, self.offset = tensor.view(-1), offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)
        self._tensor = tensor

    def __add__(self, offset):
        return Pointer(self._tensor, self.offset + _raw(offset))

    __radd__ = __add__

    def places(self, mask):
        """Target indices and mask; every unmasked index is in bounds."""
        at = torch.as_tensor(self.offset)
        kept = torch.ones_like(at, dtype=torch.bool) if mask is None else _raw(mask)
        at, kept = torch.broadcast_tensors(at, torch.as_tensor(kept))
        inside = (at >= 0) & (at < len(self.flat))
        assert bool((inside | ~kept).all()), "an index outside its tensor"
        return torch.where(kept, at, 0).long(), kept


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data):
        self.data, self.shape, self.dtype = data, list(data.shape), data.dtype

    def index(self, i):
        return Shared(self.data[int(i)])

    def slice(self, start, length, dim):
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def load(self, layout):
        return Value(self.data.clone(), layout)

    def store(self, value):
        assert value.data.dtype == self.dtype
        self.data.copy_(value.data)

    @property
    def poison(self):
        return float("nan") if self.dtype.is_floating_point else ABSURD


class Product:
    """An asynchronous matrix product."""

    def __init__(self, a, b, acc, use_acc):
        self.operands = a, b
        self.seen = [x.data.clone() for x in self.operands]
        self.acc, self.use_acc, self.result = acc, use_acc, None
        self.dtype = a.dtype

    def finish(self):
        if self.result is not None:
            return
        for operand, seen in zip(self.operands, self.seen, strict=True):
            same = torch.equal(operand.data.nan_to_num(nan=7e7), seen.nan_to_num(nan=7e7))
            assert same, "an operand changed under its product"
        product = self.seen[0].float() @ self.seen[1].float()
        if self.use_acc:
            acc = self.acc.result if isinstance(self.acc, Product) else self.acc
            product = product + acc.data
        self.result = Value(product, self.layout)

    @property
    def layout(self):
        return self.acc.layout if isinstance(self.acc, Product) else self.acc.type.layout


class Barrier:
    def __init__(self):
        self.changed = threading.Condition()
        self.phase, self.count, self.left = 0, 0, 0

    def init(self, count):
        self.count = self.left = count

    def arrive(self, count):
        with self.changed:
            assert 0 < count <= self.left, "more arrivals than the barrier expects"
            self.left -= count
            if self.left == 0:
                self.phase, self.left = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            done = self.changed.wait_for(
                lambda: self.phase % 2 != parity or _here.launch.failure, PATIENCE_S
            )
            assert done and not _here.launch.failure, "waited for a barrier in vain"


def _dawdle():
    """Vary the order of events; the same order in every run."""
    time.sleep(_here.rng.random() * 1e-4)


# The parts of `gl` and related modules that the kernels under test use.


def _arange(start, stop, layout=None):
    return Value(torch.arange(start, stop, dtype=torch.int32), layout)


def _load(pointer, mask=None, other=0):
    at, kept = pointer.places(mask)
    found = pointer.flat[at]
    return Value(torch.where(kept, found, torch.as_tensor(other, dtype=found.dtype)))


def _store(pointer, value, mask=None):
    at, kept = pointer.places(mask)
    data, at, kept = torch.broadcast_tensors(value.data.to(pointer.flat.dtype), at, kept)
    pointer.flat[at[kept]] = data[kept]


def _atomic_add(pointer, value, mask=None, sem=None):
    at, kept = pointer.places(mask)
    data, at, kept = torch.broadcast_tensors(value.data, at, kept)
    with _here.launch.lock:
        pointer.flat.index_put_((at[kept],), data[kept], accumulate=True)


def _allocate(dtype, shape, layout):
    if layout == "barrier":
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda i: barriers[int(i)])
    shared = Shared(torch.empty(shape, dtype=dtype))
    shared.data.fill_(shared.poison)
    return shared


def _warp_specialize(functions_and_args, warps, registers):
    assert len(warps) == len(registers) == len(functions_and_args) - 1
    launch = _here.launch

    def play(function, args, count, rng):
        _enter(launch, count, rng)
        try:
            function(*args)
            assert not _here.copies, "copies that were never waited for"
        except BaseException as error:
            launch.failure = launch.failure or error

    players = [
        threading.Thread(target=play, args=(*each, count, random.Random(i)))
        for i, (each, count) in enumerate(
            zip(functions_and_args, [_here.warps, *warps], strict=True)
        )
    ]
    for player in players:
        player.start()
    for player in players:
        player.join()
    if launch.failure:
        raise launch.failure


def _enter(launch, warps, rng):
    _here.launch, _here.warps, _here.rng = launch, warps, rng
    _here.copies, _here.products = [], deque()


def _copy(shared, pointer, mask=None):
    at, kept = pointer.places(mask)
    assert list(at.shape) == shared.shape
    shared.data.fill_(shared.poison)
    target, flat = shared.data, pointer.flat
    zero = torch.zeros((), dtype=flat.dtype)
    _here.copies.append(lambda: target.copy_(torch.where(kept, flat[at], zero)))


def _arrive_after_copies(barrier, increment_count=True):
    assert not increment_count
    copies, _here.copies = _here.copies, []
    threads, late = 32 * _here.warps, _here.rng.random() * 3e-4

    def later():
        time.sleep(late)
        for copy in copies:
            copy()
        barrier.arrive(threads)

    threading.Thread(target=later).start()


def _wait_group(outstanding=0):
    assert outstanding == 0
    while _here.copies:
        _here.copies.pop(0)()


def _mma(a, b, acc, use_acc=True, is_async=False):
    assert is_async
    product = Product(a, b, acc, use_acc)
    _here.products.append(product)
    return product


def _mma_wait(outstanding=0, deps=()):
    _dawdle()
    while len(_here.products) > outstanding:
        _here.products.popleft().finish()
    results = []
    for dep in deps:
        if isinstance(dep, Product):
            assert dep.result is not None, "a product was used before it was waited for"
            dep = dep.result
        results.append(dep)
    return results[0] if len(results) == 1 else tuple(results)


def _wait(barrier, parity, pred=True):
    _dawdle()
    if bool(_raw(pred)):
        barrier.wait(int(_raw(parity)))


_layout = lambda *args, **kwargs: "layout"  # noqa: E731


GL = SimpleNamespace(
    arange=_arange,
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    allocate_shared_memory=_allocate,
    warp_specialize=_warp_specialize,
    program_id=lambda axis: Value(_here.launch.program),
    num_warps=lambda: _here.warps,
    expand_dims=lambda x, axis: Value(x.data.unsqueeze(axis), x.type.layout),
    convert_layout=lambda x, layout: Value(x.data, layout),
    full=lambda shape, value, dtype, layout: Value(torch.full(shape, value, dtype=dtype), layout),
    where=lambda kept, a, b: Value(
        torch.where(_raw(kept), torch.as_tensor(_raw(a)), torch.as_tensor(_raw(b)))
    ),
    maximum=lambda a, b: Value(torch.maximum(_raw(a), torch.as_tensor(_raw(b)))),
    minimum=lambda a, b: Value(torch.minimum(torch.as_tensor(_raw(a)), torch.as_tensor(_raw(b)))),
    max=lambda x, axis: Value(x.data.amax(axis)),
    sum=lambda x, axis: Value(x.data.sum(axis)),
    exp2=lambda x: Value(x.data.exp2(), x.type.layout),
    log=lambda x: Value(x.data.log(), x.type.layout),
    static_range=range,
    constexpr=lambda x: x,
    int32=torch.int32,
    int64=torch.int64,
    float32=torch.float32,
    bfloat16=torch.bfloat16,
    BlockedLayout=_layout,
    SliceLayout=_layout,
    NVMMASharedLayout=_layout,
    NVMMADistributedLayout=_layout,
    SwizzledSharedLayout=_layout,
)
LANGUAGE = {
    "gl": GL,
    "tl": SimpleNamespace(range=lambda *bounds, **hints: range(*(int(_raw(b)) for b in bounds))),
    "range": lambda *bounds: range(*(int(_raw(b)) for b in bounds)),
    "async_copy": SimpleNamespace(
        mbarrier_arrive=_arrive_after_copies, commit_group=lambda: None, wait_group=_wait_group
    ),
    "mbarrier": SimpleNamespace(
        init=lambda barrier, count: barrier.init(count),
        arrive=lambda barrier, count=1: barrier.arrive(count),
        wait=_wait,
        MBarrierLayout=lambda: "barrier",
    ),
    "copy_rows": _copy,
    "thread_barrier": lambda: None,
    "fence_async_shared": lambda: None,
    "warpgroup_mma": _mma,
    "warpgroup_mma_init": lambda x: x,
    "warpgroup_mma_wait": _mma_wait,
}


class Kernel:
    """A kernel with Triton's launch syntax."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):  # from another kernel
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        assert len(grid) == 1
        return lambda *args, **constants: self.launch(grid[0], args, constants)

    def launch(self, programs, args, constants):
        warps = constants.pop("num_warps")
        args = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
        for program in range(programs):
            launch = SimpleNamespace(program=program, failure=None, lock=threading.Lock())
            _enter(launch, warps, random.Random(program))
            self.function(*args, **constants)
            assert not _here.copies, "copies that were never waited for"


def on_host(*modules: ModuleType) -> list[SimpleNamespace]:
    """The modules' functions rewritten to run on the CPU, kernels and launchers alike."""
    namespaces = [dict(vars(module)) for module in modules]
    names: dict[str, object] = {}
    for space in namespaces:
        for name, thing in space.items():
            source = thing if isinstance(thing, FunctionType) else getattr(thing, "fn", None)
            if isinstance(source, FunctionType) and source.__module__ == space["__name__"]:
                copied = FunctionType(
                    source.__code__, space, name, source.__defaults__, source.__closure__
                )
                copied.__kwdefaults__ = source.__kwdefaults__
                names[name] = copied if thing is source else Kernel(copied)
    for space in namespaces:
        constants = {n: x.value for n, x in space.items() if type(x).__name__ == "constexpr"}
        space.update(constants)
        space.update({name: thing for name, thing in names.items() if name in space})
        space.update({name: thing for name, thing in LANGUAGE.items() if name in space})
        space["range"] = LANGUAGE["range"]
    return [SimpleNamespace(**space) for space in namespaces]

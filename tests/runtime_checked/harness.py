"""Checked mode of the runtime, driven by cores written as Python generators.

A generator stands for a coroutine: it yields where compiled code would suspend.
"""

import contextlib
import ctypes
import itertools

import numpy as np

from cokernel import _runtime

OFFSETS = _runtime.abi_offsets()
READ, WRITE, ATOMIC, UPDATE, FETCH_AND_ADD = range(5)
STRATEGIES = ["random", "pct", "round_robin", "delay_dma", "run_to_block"]

_I32, _I64, _P = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_RUN = ctypes.CFUNCTYPE(None, _P, _P)
_SIGNATURES = {
    "cokernel_frame": (_P, _P, _I64),
    "cokernel_finish": (None, _P),
    "cokernel_fail_index": (None, _P, _I32, _I32, _I64, _I64, _I64),
    "cokernel_checked_step": (_I32, _P, _I32, _P),
    "cokernel_checked_yield": (None, _P, _I32),
    "cokernel_checked_wait": (_I32, _P, _P, _I64, _I32, _I32, _I32),
    "cokernel_checked_barrier": (_I32, _P, _I32),
    "cokernel_checked_signal": (None, _P, _P, _I64, _I32),
    "cokernel_checked_read": (_I32, _P, _P, _I32),
    "cokernel_checked_access": (_I32, _P, _I32, _I32, _P, _I64, _I64),
    "cokernel_checked_access_strided": (_I32, _P, _I32, _I32, _P, _I64, _I64, _P, _P),
    "cokernel_checked_access_picked": (None, _P, _I32, _I32, _P, _I64, _I64, _I64, _P),
    "cokernel_checked_dma": (None, _P, _I32, _P, _P, _I64, _P, _I64, _P, _I64),
    "cokernel_checked_copy_undefined": (None, _P, _P, _P, _I64, _I64, _P, _P, _P),
    "cokernel_checked_allocate": (None, _P, _I32, _P, _I64, _I64, _I32),
    "cokernel_checked_release": (None, _P, _I32, _P, _I64, _I32),
    "cokernel_checked_undefined": (_I32, _P, _P, _I64, _I64, _P, _P, _P, _I32, _I64),
    "cokernel_checked_mark_undefined": (None, _P, _P, _I64, _I64, _P, _P, _P, _I64, _P),
    "cokernel_checked_report_undefined": (None, _P, _I32, _I32, _P, _I64, _P, _I32),
}
ADDRESSES = _runtime.function_addresses()
CALL = {
    name.removeprefix("cokernel_").removeprefix("checked_"): ctypes.CFUNCTYPE(*signature)(
        ADDRESSES[name]
    )
    for name, signature in _SIGNATURES.items()
}


def _pointer(address):
    return ctypes.c_void_p.from_address(address).value


def _table(values):
    return np.array(values, np.int64)


class Core:
    """A core as its generator sees it."""

    def __init__(self, kernel, address):
        self.kernel = kernel
        self.address = address
        self.index = _I32.from_address(address + OFFSETS["Core.index"]).value
        self.memory = _pointer(address + OFFSETS["Core.memory"])
        self.scratch = self.memory + 16 * kernel.semaphores
        self._buffers = _pointer(address + OFFSETS["Core.buffers"])

    def buffer(self, number):
        return _pointer(self._buffers + 8 * number)

    def semaphore(self, number=0, core=None):
        launch = _pointer(self.address)
        cores = _pointer(launch + OFFSETS["Launch.cores"])
        index = self.index if core is None else core
        other = cores + index * OFFSETS["sizeof.Core"]
        return _pointer(other + OFFSETS["Core.memory"]) + 16 * number

    # What may suspend.

    def step(self, site=0, about=None):
        if not CALL["step"](self.address, site, about):
            yield

    def poll(self, semaphore, site=0):
        CALL["yield"](self.address, site)
        yield
        return CALL["read"](self.address, semaphore, site)

    def wait(self, semaphore, value=1, *, decrement=True, is_dma=False, site=0):
        if not CALL["wait"](self.address, semaphore, value, decrement, is_dma, site):
            yield

    def barrier(self, site=0):
        if not CALL["barrier"](self.address, site):
            yield

    def signal(self, semaphore, value=1, site=0):
        yield from self.step(site, semaphore)
        CALL["signal"](self.address, semaphore, value, site)

    def fetch_and_add(self, address, site=0):
        yield from self.step(site, address)
        CALL["access"](self.address, site, FETCH_AND_ADD, address, 4, 4)
        cell = _I32.from_address(address)
        cell.value += 1
        return cell.value - 1

    def copy(self, target, source, size, arrival=None, departure=None, site=0, element=4):
        """Starts a DMA."""
        yield from self.step(site)
        packed = _table([target, source, size, element, site])
        CALL["dma"](
            self.address,
            site,
            ctypes.cast(_COPY, _P),
            packed.ctypes.data,
            packed.nbytes,
            arrival,
            size,
            departure,
            size,
        )

    # What does not.

    def access(self, kind, address, size=4, site=0, element=4):
        return CALL["access"](self.address, site, kind, address, size, element)

    def read(self, address, size=4, site=0, element=4):
        """Returns whether the runtime says that something there is undefined."""
        return bool(self.access(READ, address, size, site, element))

    def write(self, address, size=4, site=0, element=4, value=1):
        ctypes.memset(address, value, size)
        self.access(WRITE, address, size, site, element)

    def undefined(self, address, count=1, site=0, element=4, number=0):
        """Reads elements; returns which of them are undefined, or None."""
        self.read(address, count * element, site, element)
        mask = np.zeros(count, np.uint8)
        extents, strides = _table([count]), _table([element])
        found = CALL["undefined"](
            self.address,
            address,
            element,
            1,
            extents.ctypes.data,
            strides.ctypes.data,
            mask.ctypes.data,
            number,
            0,
        )
        return mask.tolist() if found else None

    def mark_undefined(self, address, mask, element=4, numbers=(0,)):
        sources = _sources(numbers)
        mask = np.array(mask, np.uint8)
        extents, strides = _table([len(mask)]), _table([element])
        CALL["mark_undefined"](
            self.address,
            address,
            element,
            1,
            extents.ctypes.data,
            strides.ctypes.data,
            mask.ctypes.data,
            0,
            sources.ctypes.data,
        )

    def report_undefined(self, site=0, use=0, numbers=(0,)):
        sources = _sources(numbers)
        CALL["report_undefined"](self.address, site, use, None, 0, sources.ctypes.data, 0)


def _sources(numbers):
    """Says of values that each is an element of these reads: that with the same number."""
    known_and_sure, extent, stride = 3, 1 << 20, 1
    words = [[number, known_and_sure, 0, 1, extent, stride, 0] for number in numbers]
    return _table([len(numbers), *itertools.chain.from_iterable(words)])


@_RUN
def _COPY(core, arguments):
    target, source, size, element, site = (ctypes.c_int64 * 5).from_address(arguments)
    CALL["access"](core, site, READ, source, size, element)
    CALL["access"](core, site, WRITE, target, size, element)
    ctypes.memmove(target, source, size)
    if site in _kernels[-1].on_copy:
        _kernels[-1].on_copy[site]()
    extents, strides = _table([size // element]), _table([element])
    CALL["copy_undefined"](
        core,
        target,
        source,
        element,
        1,
        extents.ctypes.data,
        strides.ctypes.data,
        strides.ctypes.data,
    )


_keys = itertools.count(1 << 42)
_kernels = []  # The one that runs is the last.


class Kernel:
    """An executable whose cores all run one generator function."""

    def __init__(self, body, cores=1, *, semaphores=4, scratch=4096, **checked):
        self.body = body
        self.semaphores = semaphores
        self.records = []
        self.errors = []
        self.generators = {}
        self.on_copy = {}  # By the site of a DMA, what to call when it takes effect.
        _kernels.append(self)
        # Both are kept alive, because the runtime knows only their addresses.
        self.ramp = ctypes.CFUNCTYPE(_P, _P)(self._start)
        self.resume = ctypes.CFUNCTYPE(None, _P)(self._resume)
        self.key = next(_keys)
        program = {
            "name": "program",
            "entry": ctypes.cast(self.ramp, _P).value,
            "is_coroutine": True,
            "shape": (cores,),
            "group_axis": -1,
            "private_bytes": 16 * semaphores + scratch,
            "semaphore_bytes": 16 * semaphores,
            "uses_barrier": True,
        }
        spec = {
            "name": "kernel",
            "programs": [program],
            "checked": checked,
            "checked_report": self._report,
        }
        _runtime.register_executable(self.key, spec)

    def launch(self, *arrays):
        """Launches on NumPy arrays. Returns the record."""
        self.generators.clear()
        buffers = [(array.ctypes.data, array.nbytes) for array in arrays]
        self.error = ""
        try:
            _runtime.launch(self.key, buffers)
        except RuntimeError as error:
            self.error = str(error)
        if self.errors:
            raise self.errors[0]
        return self.records[-1]

    def _report(self, record):
        self.records.append(record)
        return "failed" if record["failure"] else ""

    def _start(self, address):
        frame = CALL["frame"](address, 64)
        _P.from_address(frame).value = ctypes.cast(self.resume, _P).value
        _P.from_address(frame + 8).value = address
        self.generators[address] = self.body(Core(self, address))
        self._resume(frame)
        return frame

    def _resume(self, frame):
        address = _pointer(frame + 8)
        try:
            next(self.generators[address])
        except StopIteration:
            CALL["finish"](address)
        except Exception as error:
            self.errors.append(error)
            CALL["finish"](address)

    def close(self):
        _kernels.remove(self)
        _runtime.unregister_executable(self.key)


@contextlib.contextmanager
def schedule(**fields):
    before = _runtime.set_schedule(fields)
    try:
        yield
    finally:
        _runtime.set_schedule(before)


def kinds(record):
    return sorted(finding["kind"] for finding in record["findings"])

"""A CUDA process for tests: evaluates one Python expression a line with the helpers below and
answers with JSON; rule: it knows nothing of icecore.

Run as a program, beside a fake libcuda (``LD_LIBRARY_PATH``). It finds the driver's calls through
``dlsym`` (`cuda`) and through ``cuGetProcAddress`` (`entry`), as ctypes, PyTorch and the CUDA
runtime do.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable

cuda = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20
_stop = threading.Event()
_socket: socket.socket
_rounds: list[int] = []
_errors: list[str] = []
_workers: list[threading.Thread] = []
_answers: list[object] = []


def entry(name: str, version: int = 13000, flags: int = 0, older: bool = False) -> ctypes._CFuncPtr:
    """A call by ``cuGetProcAddress``, itself found as the CUDA runtime does it."""
    found = ctypes.c_void_p()
    if older:
        assert (
            cuda.cuGetProcAddress(
                name.encode(), ctypes.byref(found), version, ctypes.c_ulonglong(flags)
            )
            == 0
        )
    else:
        again = ctypes.c_void_p()
        status = ctypes.c_int()
        ask = (ctypes.byref(found), version, ctypes.c_ulonglong(flags), ctypes.byref(status))
        assert (
            cuda.cuGetProcAddress_v2(
                b"cuGetProcAddress",
                ctypes.byref(again),
                12000,
                ctypes.c_ulonglong(0),
                ctypes.byref(status),
            )
            == 0
        )
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_ulonglong,
            ctypes.c_void_p,
        )
        assert kind(again.value)(name.encode(), *ask) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulonglong)(found.value)


def unseen(name: str, *arguments: type[ctypes._CDataType]) -> ctypes._CFuncPtr:
    """Return a call that bypasses the preload; by default it takes one number."""
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    found = kind(("dlvsym", ctypes.CDLL(None)))(cuda._handle, name.encode(), b"FAKE")
    return ctypes.CFUNCTYPE(ctypes.c_int, *(arguments or (ctypes.c_ulonglong,)))(found)


def start_unseen(device: int = 0) -> int:
    """Make a context that bypasses the preload, and make it current."""
    create = unseen("cuCtxCreate_v2", ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)
    return start(device, create)


def start(device: int = 0, create: Callable[..., int] = cuda.cuCtxCreate_v2) -> int:
    """A context on a device, made current."""
    code = cuda.cuInit(0)
    context = ctypes.c_void_p()
    code = code or create(ctypes.byref(context), 0, device)
    assert code == 0, code
    return context.value or 0


def current(context: int | None) -> int:
    """Make a context current."""
    return int(cuda.cuCtxSetCurrent(ctypes.c_void_p(context)))


def alloc(size: int, call: object = None) -> tuple[int, int]:
    """(result, address)."""
    out = ctypes.c_ulonglong()
    code = (call or cuda.cuMemAlloc_v2)(ctypes.byref(out), ctypes.c_ulonglong(size))  # type: ignore[operator]
    return int(code), out.value


def pitched(width: int, height: int, element: int = 4) -> tuple[int, int, int]:
    """(result, address, pitch)."""
    out, pitch = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    code = cuda.cuMemAllocPitch_v2(
        ctypes.byref(out),
        ctypes.byref(pitch),
        ctypes.c_ulonglong(width),
        ctypes.c_ulonglong(height),
        element,
    )
    return int(code), out.value, pitch.value


def free(address: int, call: object = None) -> int:
    """cuMemFree."""
    return int((call or cuda.cuMemFree_v2)(ctypes.c_ulonglong(address)))  # type: ignore[operator]


def free_async(address: int, stream: int = 0, per_thread: bool = False) -> int:
    """cuMemFreeAsync, as a program that was compiled for one or the other default stream finds it."""
    found = ctypes.cast(entry("cuMemFreeAsync", flags=2 * per_thread), ctypes.c_void_p).value
    assert found is not None
    return int(
        ctypes.CFUNCTYPE(ctypes.c_int)(found)(ctypes.c_ulonglong(address), ctypes.c_void_p(stream))
    )


def vm(name: str, *arguments: object) -> int:
    """A call of the driver's virtual memory management, found as NCCL finds it."""
    found = ctypes.cast(entry(name), ctypes.c_void_p).value
    assert found is not None
    return int(
        ctypes.CFUNCTYPE(ctypes.c_int)(found)(
            *(ctypes.c_ulonglong(a) if isinstance(a, int) else a for a in arguments)
        )
    )


def _numbers(*values: int) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * 12)(*values)


def create(size: int, device: int = 0, types: int = 1, place: int = 1) -> tuple[int, int]:
    """(result, handle) of cuMemCreate; ``place`` 3: host memory."""
    out = ctypes.c_ulonglong()
    return vm(
        "cuMemCreate", ctypes.byref(out), size, _numbers(1, types, place, device), 0
    ), out.value


def reserve(size: int) -> int:
    """An address range."""
    out = ctypes.c_ulonglong()
    assert vm("cuMemAddressReserve", ctypes.byref(out), size, 0, 0, 0) == 0
    return out.value


def access(address: int, size: int, device: int = 0, flags: int = 3) -> int:
    """cuMemSetAccess."""
    return vm("cuMemSetAccess", address, size, _numbers(1, device, flags), 1)


def mapped(handle: int, size: int, device: int = 0) -> int:
    """The address at which memory is mapped, as NCCL does it."""
    address = reserve(size)
    assert (vm("cuMemMap", address, size, 0, handle, 0), access(address, size, device)) == (0, 0)
    return address


def unmapped(address: int, size: int) -> list[int]:
    """The reverse."""
    return [vm("cuMemUnmap", address, size), vm("cuMemAddressFree", address, size)]


def export(handle: int) -> tuple[int, int]:
    """(result, descriptor)."""
    out = ctypes.c_int(-1)
    return vm("cuMemExportToShareableHandle", ctypes.byref(out), handle, 1, 0), out.value


def imported(descriptor: int) -> tuple[int, int]:
    """(result, handle) of a descriptor, which is closed."""
    out = ctypes.c_ulonglong()
    code = vm("cuMemImportFromShareableHandle", ctypes.byref(out), descriptor, 1)
    os.close(descriptor)
    return code, out.value


def retained(address: int) -> tuple[int, int]:
    """(result, handle) of cuMemRetainAllocationHandle."""
    out = ctypes.c_ulonglong()
    return vm("cuMemRetainAllocationHandle", ctypes.byref(out), address), out.value


def properties(handle: int) -> list[int]:
    """Result, type, handle types, kind of place, device."""
    out = _numbers()
    return [vm("cuMemGetAllocationPropertiesFromHandle", out, handle), *out[:4]]


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("bytes", ctypes.c_char * 64)]


def ipc_handle(address: int) -> tuple[int, str]:
    """(result, handle in hexadecimal digits) of cuIpcGetMemHandle."""
    out = IpcHandle()
    code = cuda.cuIpcGetMemHandle(ctypes.byref(out), ctypes.c_ulonglong(address))
    return int(code), bytes(out).hex()


def ipc_open(handle: str, flags: int = 1, call: object = None) -> tuple[int, int]:
    """(result, address) of cuIpcOpenMemHandle."""
    out = ctypes.c_ulonglong()
    what = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
    code = (call or cuda.cuIpcOpenMemHandle_v2)(ctypes.byref(out), what, flags)  # type: ignore[operator]
    return int(code), out.value


def _pointers(name: str, per_thread: bool = False) -> ctypes._CFuncPtr:
    """Return a driver call that takes any arguments, found as the CUDA runtime finds it."""
    found = ctypes.cast(entry(name, flags=2 * per_thread), ctypes.c_void_p).value
    assert found is not None
    return ctypes.CFUNCTYPE(ctypes.c_int)(found)


def event(flags: int = 6) -> tuple[int, int]:
    """(result, event) of cuEventCreate; by default, an interprocess event without timing."""
    out = ctypes.c_void_p()
    code = cuda.cuEventCreate(ctypes.byref(out), flags)
    return int(code), out.value or 0


def event_call(name: str, event: int, *arguments: int, per_thread: bool = False) -> int:
    """Make a driver call on an event, found as the CUDA runtime finds it; return the result."""
    call = _pointers(name, per_thread)
    return int(call(ctypes.c_void_p(event), *(ctypes.c_void_p(one) for one in arguments)))


def event_nodes(event: int) -> list[int]:
    """Return the results of the calls that add a node to a graph; the node records the event."""
    out, kind = ctypes.c_void_p(), 7
    parameters = (ctypes.c_ulonglong * 32)(kind, 0, event)
    return [
        call(
            ctypes.byref(out),
            ctypes.c_void_p(1),
            None,
            *([None] if older is None else []),
            ctypes.c_size_t(0),
            older or ctypes.byref(parameters),
        )
        for call, older in (
            (_pointers("cuGraphAddEventRecordNode"), ctypes.c_void_p(event)),
            (_pointers("cuGraphAddNode"), None),
        )
    ]


def event_handle(event: int) -> tuple[int, str]:
    """(result, handle in hexadecimal digits) of cuIpcGetEventHandle."""
    out = IpcHandle()
    code = cuda.cuIpcGetEventHandle(ctypes.byref(out), ctypes.c_void_p(event))
    return int(code), bytes(out).hex()


def event_open(handle: str) -> tuple[int, int]:
    """(result, event) of cuIpcOpenEventHandle."""
    out = ctypes.c_void_p()
    what = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
    code = cuda.cuIpcOpenEventHandle(ctypes.byref(out), what)
    return int(code), out.value or 0


def ipc_entry(version: int) -> ctypes._CFuncPtr:
    """cuIpcOpenMemHandle as ``cuGetProcAddress`` finds it."""
    found = ctypes.cast(entry("cuIpcOpenMemHandle", version), ctypes.c_void_p).value
    assert found is not None
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, IpcHandle, ctypes.c_uint)(found)


def ipc_close(address: int) -> int:
    """cuIpcCloseMemHandle."""
    return int(cuda.cuIpcCloseMemHandle(ctypes.c_ulonglong(address)))


def ipc_churn(handles: list[str], sizes: list[int], threads: int) -> int:
    """Threads that open, check, write and close others' memory until `churned`; each has a page of
    its own in all of it.
    """

    def run(seed: int) -> None:
        mine = 0
        while not _stop.is_set():
            for handle, size in zip(handles, sizes, strict=True):
                code, address = ipc_open(handle)
                assert code == 0, code
                at = address + size - 4096 * (seed + 1)
                assert mine == 0 or ctypes.string_at(at, 4096) == bytes([mine & 0xFF]) * 4096, (
                    seed,
                    mine,
                )
                ctypes.memset(at, mine + 1 & 0xFF, 4096)
                assert ipc_close(address) == 0
            mine += 1
            _rounds.append(seed)

    return _begin(threads, run)


def listen(path: str) -> bool:
    """Be there for `send`."""
    global _socket
    _socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    _socket.bind(path)
    return True


def send(path: str, handle: int) -> int:
    """Give memory to another process, as NCCL does: a descriptor that is closed at once; the
    export's result.
    """
    code, descriptor = export(handle)
    if code == 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(path)
            socket.send_fds(sender, [b"x"], [descriptor])
        os.close(descriptor)
    return code


def received() -> int:
    """The handle of what was sent."""
    _, descriptors, _, _ = socket.recv_fds(_socket, 1, 1)
    code, handle = imported(descriptors[0])
    assert code == 0, code
    return handle


def churn(threads: int) -> int:
    """Threads that create, map, export, import, check and let go of memory until `churned`."""

    def run(seed: int) -> None:
        held: list[tuple[int, int, int, int]] = []
        while not _stop.is_set():
            code, handle = create(2 * MIB)
            assert code == 0, code
            address = mapped(handle, 2 * MIB)
            value = len(_rounds) & 0xFF
            ctypes.memset(address, value, 4096)
            code, descriptor = export(handle)
            assert code == 0, code
            code, other = imported(descriptor)
            assert code == 0, code
            held.append((handle, other, mapped(other, 2 * MIB), value))
            assert unmapped(address, 2 * MIB) == [0, 0]
            if len(held) > 3:
                handle, other, address, value = held.pop(0)
                assert ctypes.string_at(address, 4096) == bytes([value]) * 4096, (seed, value)
                assert [
                    vm("cuMemRelease", handle),
                    vm("cuMemRelease", other),
                    *unmapped(address, 2 * MIB),
                ] == [0] * 4
            _rounds.append(seed)

    return _begin(threads, run)


def _begin(threads: int, run: Callable[[int], None]) -> int:
    """Threads with this one's context, each with its number."""
    context = ctypes.c_void_p()
    cuda.cuCtxGetCurrent(ctypes.byref(context))

    def begin(seed: int) -> None:
        cuda.cuCtxSetCurrent(ctypes.c_void_p(context.value))
        try:
            run(seed)
        except BaseException as error:  # noqa: BLE001 - told to the test
            _errors.append(repr(error))

    for seed in range(threads):
        threading.Thread(target=begin, args=(seed,), daemon=True).start()
    return threads


def churned() -> tuple[int, list[str]]:
    """How often they did so, and what went wrong."""
    return len(_rounds), _errors


def fill(address: int, size: int, seed: int) -> str:
    """Write bytes; their hash."""
    data = (hashlib.sha256(str(seed).encode()).digest() * (size // 32 + 1))[:size]
    ctypes.memmove(address, data, size)
    return hashlib.sha256(data).hexdigest()


def hashed(address: int, size: int) -> str:
    """The hash of what is there."""
    return hashlib.sha256(ctypes.string_at(address, size)).hexdigest()


def info() -> tuple[int, int]:
    """Free and total bytes of the current device."""
    unused, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cuMemGetInfo_v2(ctypes.byref(unused), ctypes.byref(total)) == 0
    return unused.value, total.value


def stack_limit() -> int:
    """Return the bytes of local memory for each thread of the current context."""
    value = ctypes.c_size_t()
    assert cuda.cuCtxGetLimit(ctypes.byref(value), 0) == 0
    return value.value


def least_stack() -> int:
    """Return the smallest such limit that any context was ever set to."""
    cuda.fake_least_stack.restype = ctypes.c_size_t
    return int(cuda.fake_least_stack())


def loop(size: int, rounds: int, some: int = 1) -> list[int]:
    """So many allocations, written and released, in each round; the addresses of the last."""
    addresses: list[int] = []
    for _ in range(rounds):
        made = [alloc(size) for _ in range(some)]
        assert [code for code, _ in made] == [0] * some, made
        addresses = [address for _, address in made]
        for address in addresses:
            ctypes.memset(address, 0x5A, 4096)
        assert [free(address) for address in addresses] == [0] * some
    return addresses


def calls() -> dict[str, int]:
    """How often the fake driver was asked for what it takes to allocate, and for anything."""
    names = (
        "cuMemCreate",
        "cuMemMap",
        "cuMemUnmap",
        "cuMemExportToShareableHandle",
        "cuMemAlloc_v2",
        "cuCtxSynchronize",
    )
    cuda.fake_calls.restype = ctypes.c_ulong
    return {
        name or "all": cuda.fake_calls(name.encode() if name else None) for name in (*names, "")
    }


def told(address: int) -> list[object]:
    """What the driver tells of an address, by each of its calls: results, and what is there."""
    word, base, size = ctypes.c_uint(), ctypes.c_ulonglong(), ctypes.c_size_t()
    kinds, places = (ctypes.c_int * 1)(2), (ctypes.c_void_p * 1)(ctypes.addressof(word))
    at = ctypes.c_ulonglong(address)
    return [
        cuda.cuPointerGetAttribute(ctypes.byref(word), 2, at),
        vm("cuPointerGetAttributes", 1, kinds, places, address),
        word.value,
        cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), at),
        cuda.cuPointerSetAttribute(ctypes.byref(word), 6, at),
        ipc_handle(address)[0],
        retained(address)[0],
    ]


def recycle(threads: int, sizes: list[list[int]]) -> int:
    """Threads that allocate, write, check and release, each its sizes in turn, until `churned`."""

    def run(seed: int) -> None:
        for number in itertools.count():
            if _stop.is_set():
                return
            size = sizes[seed][number % len(sizes[seed])]
            code, address = alloc(size)
            assert code == 0, (seed, size, code)
            value = bytes([number + 85 * seed & 0xFF]) * 4096
            for at in (address, address + size - 4096):
                ctypes.memmove(at, value, 4096)
            for at in (address, address + size - 4096):
                assert ctypes.string_at(at, 4096) == value, (seed, number)
            assert free(address) == 0
            _rounds.append(seed)

    return _begin(threads, run)


def begun(work: Callable[[], object]) -> None:
    """Have a thread with this one's context do something, whose answer is `ended`'s."""
    context = ctypes.c_void_p()
    cuda.cuCtxGetCurrent(ctypes.byref(context))
    _answers.clear()
    _workers[:] = [
        threading.Thread(target=lambda: [current(context.value), _answers.append(work())])
    ]
    _workers[0].start()


def ended() -> object:
    """The answer of what was `begun`."""
    _workers[0].join()
    return _answers[0]


def masked(mask: int, seconds: float = 60.0) -> int:
    """A thread that sets its signal mask by a system call of its own, and after so many seconds an
    empty one; its id.
    """
    known = threading.Event()
    found = []

    def run() -> None:
        set_mask = {"x86_64": 14, "aarch64": 135}[os.uname().machine]
        for one, how_long in ((mask, seconds), (0, 60.0)):
            ctypes.CDLL(None).syscall(set_mask, 2, ctypes.byref(ctypes.c_uint64(one)), None, 8)
            found.append(threading.get_native_id())
            known.set()
            if _stop.wait(how_long):
                return

    threading.Thread(target=run).start()
    assert known.wait(10)
    return found[0]


def forked(expression: str) -> object:
    """What an expression is in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(eval(expression, globals()))
        except BaseException as error:  # noqa: BLE001 - told to the parent
            answer = json.dumps(repr(error))
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return json.loads(data)


def main() -> None:
    """Entry."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        try:
            answer: object = eval(line, globals())
        except Exception as error:  # noqa: BLE001 - told to the test
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""A CUDA process for tests: evaluates one Python expression a line with the helpers below and answers with JSON; rule: it knows nothing of icecore.

Run as a program, beside a fake libcuda (``LD_LIBRARY_PATH``). It finds the driver's calls through ``dlsym`` (`cuda`) and through ``cuGetProcAddress``
(`entry`), as ctypes, PyTorch and the CUDA runtime do.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import threading

cuda = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20
_stop = threading.Event()


def entry(name: str, version: int = 13000, flags: int = 0, older: bool = False) -> ctypes._CFuncPtr:
    """A call by ``cuGetProcAddress``, itself found as the CUDA runtime does it."""
    found = ctypes.c_void_p()
    if older:
        assert cuda.cuGetProcAddress(name.encode(), ctypes.byref(found), version, ctypes.c_ulonglong(flags)) == 0
    else:
        again = ctypes.c_void_p()
        status = ctypes.c_int()
        ask = (ctypes.byref(found), version, ctypes.c_ulonglong(flags), ctypes.byref(status))
        assert (
            cuda.cuGetProcAddress_v2(
                b"cuGetProcAddress", ctypes.byref(again), 12000, ctypes.c_ulonglong(0), ctypes.byref(status)
            )
            == 0
        )
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_void_p
        )
        assert kind(again.value)(name.encode(), *ask) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulonglong)(found.value)


def start(device: int = 0) -> int:
    """A context on a device, made current."""
    code = cuda.cuInit(0)
    context = ctypes.c_void_p()
    code = code or cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
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
        ctypes.byref(out), ctypes.byref(pitch), ctypes.c_ulonglong(width), ctypes.c_ulonglong(height), element
    )
    return int(code), out.value, pitch.value


def free(address: int, call: object = None) -> int:
    """cuMemFree."""
    return int((call or cuda.cuMemFree_v2)(ctypes.c_ulonglong(address)))  # type: ignore[operator]


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


def masked(mask: int, seconds: float = 60.0) -> int:
    """A thread that sets its signal mask by a system call of its own, and after so many seconds an empty one; its id."""
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

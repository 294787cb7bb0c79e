"""What a hostile process does to its usage file. Prints "ready" when it is done to it, or "cannot: …"
where this machine does not let it; then waits to be killed."""

import ctypes
import fcntl
import mmap
import os
import struct
import sys
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]

USERFAULTFD, UFFDIO_API, UFFDIO_REGISTER = 323, 0xC018AA3F, 0xC020AA00
PAGE = 4096


def say(text):
    print(text, flush=True)


def stuck_write(path):
    """A write whose buffer's page never comes: the file's inode stays locked."""
    uffd = libc.syscall(USERFAULTFD, os.O_CLOEXEC)
    if uffd < 0:
        return say("cannot: userfaultfd: " + os.strerror(ctypes.get_errno()))
    fcntl.ioctl(uffd, UFFDIO_API, struct.pack("QQQ", 0xAA, 0, 0))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    at = libc.mmap(None, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    fcntl.ioctl(uffd, UFFDIO_REGISTER, struct.pack("QQQQ", at, PAGE, 1, 0))
    fd = os.open(path, os.O_RDWR)
    threading.Thread(target=lambda: libc.write(fd, at, PAGE), daemon=True).start()
    # The fault arrives as a message: from then on the lock is held.
    os.read(uffd, 32)
    say("ready")


def locks(path):
    """Every byte that is a lock, in every way; and a lease, should there be one to be had."""
    files = [os.open(path, os.O_RDWR) for _ in range(3)]
    F_OFD_SETLK, F_SETLEASE = 37, 1024
    whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
    fcntl.fcntl(files[0], F_OFD_SETLK, whole)
    fcntl.flock(files[1], fcntl.LOCK_EX)
    for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK):
        try:
            fcntl.fcntl(files[2], F_SETLEASE, kind)
        except OSError:
            pass
    say("ready")


def lease(path):
    """A lease, which makes others wait that open the file. Broken leases are signalled by SIGIO."""
    import signal

    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(fd, 1024, fcntl.F_WRLCK)
    except OSError as error:
        return say(f"cannot: {error}")
    say("ready")


def fill(path):
    """Grows the file over and over, as fast as it can."""
    fd = os.open(path, os.O_RDWR)
    block = b"\xa5" * (1 << 16)
    reported = False
    while True:
        try:
            os.lseek(fd, 0, os.SEEK_END)
            while True:
                os.write(fd, block)
        except OSError:
            if not reported:
                say("ready")
            reported = True


def damage(path):
    """Everything else at once, again and again: scribbles, cuts, holes, modes, sparse growth."""
    fd = os.open(path, os.O_RDWR)
    say("ready")
    step = 0
    while True:
        step += 1
        try:
            kind = step % 7
            if kind == 0:
                os.ftruncate(fd, step * 977 % 200_000)
            elif kind == 1:
                os.pwrite(fd, os.urandom(1024), step * 1021 % 140_000)
            elif kind == 2:
                os.ftruncate(fd, 1 << 40)
            elif kind == 3:
                libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(1 << 17))
            elif kind == 4:
                os.fchmod(fd, step % 0o1000)
            elif kind == 5:
                os.ftruncate(fd, 0)
            else:
                os.setxattr(path, f"user.{step}", b"x" * 1000)
        except OSError:
            pass


mode, file = sys.argv[1:]
{"stuck": stuck_write, "locks": locks, "lease": lease, "fill": fill, "damage": damage}[mode](file)
while True:
    time.sleep(60)

"""The card's context, made while PyTorch is imported: some tenths of a second that the first token need not wait for.

PyTorch takes the device's primary context, which is one for the whole process, whoever made it. This module imports
nothing that takes time.
"""

import ctypes
import threading


def begin(arguments):
    """Begin to make the context of the card that the command's arguments name, or the first. Returns the thread, or
    None where they name no card. Where there is no driver nothing happens: who asks for a card is told later."""
    device = device_of(arguments)
    if not device.startswith("cuda"):
        return None
    number = device.partition(":")[2] or "0"
    thread = threading.Thread(target=_open, args=(int(number) if number.isdigit() else 0,), daemon=True)
    thread.start()
    return thread


def device_of(arguments):
    """What --device says; without it "cuda", as far as there is one."""
    for place, argument in enumerate(arguments):
        if argument.startswith("--device="):
            return argument.partition("=")[2]
        if argument == "--device" and place + 1 < len(arguments):
            return arguments[place + 1]
    return "cuda"


def _open(number):
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), number) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

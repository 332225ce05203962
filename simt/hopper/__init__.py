"""Hopper's asynchronous instructions.

mbarrier      arrivals, bytes, phases           tensor_map    a box of an array, swizzled
tma           bulk copies, in both directions   wgmma         products of four warps
"""

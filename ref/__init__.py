"""The truth: each algorithm in pure NumPy, summed in float64, written to be read beside the maths.

Imports NumPy and nothing else. What may not enter: speed for its own sake, torch, and anything of the course.
"""

"""The ladders: one folder a topic, one rung a file, with thin launchers, and the figures measured on them.

Stands on `lab`. What may not enter: anything that only teaches (notebooks), and anything that several topics'
workbenches need (lab).

Hugging Face has a package of this name: where the course's folder is on Python's path, `import kernels` means this one.
"""

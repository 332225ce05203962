"""What an environment's libraries carry for cards, what of it a workload loads, and a copy without the rest.

    python -m models.slim report ENVIRONMENT                        by library and by architecture
    python -m models.slim trace  ENVIRONMENT --out T -- COMMAND     which device code COMMAND loads (needs a card)
    python -m models.slim cut    ENVIRONMENT --keep-arch 9.0 --to DIR [--used T]
    python -m models.slim verify ENVIRONMENT DIR -- COMMAND         the same output? what became smaller?
    python -m models.slim explain ENVIRONMENT DIR -- COMMAND        which kernels it asks for that were cut

Nothing is changed in place: `cut` writes a copy, or nothing. A copy holds modified libraries of NVIDIA and others: it
is for the machine it was made for, and not to be passed on. What is read here is described in lab/fatbin.
"""

"""The text, and what can be said of a kernel before it runs.

reader        PTX as instructions               special_registers     %tid and its kin
blocks        basic blocks, and what is live    fused_multiply_add    a product and a sum, rounded once
types         PTX's types as NumPy's            wide_accesses         neighbours that the card joins
                                                unset                 registers that may be read unset
"""

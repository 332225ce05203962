"""Wrong answers planted on purpose, one module per chapter: a check must reject each of them."""

"""Searching launch choices on the machine at hand; the benchmarks take their timer and operands from here."""

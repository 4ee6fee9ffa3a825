"""Rivals' scaling laws as code, each with where it is from. All of them drive the same simulated fleet, behind the same
router and admission, through `sim.scaling`; `sim.experiments.scaling` sets them beside each other.
"""

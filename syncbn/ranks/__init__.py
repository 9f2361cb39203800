"""All code about ranks: process groups, the all_reduce, call sites, reports, the watchdog, and reductions."""

"""All code about ranks: process groups, the all_reduce, sites, reports, the watchdog, and calls."""

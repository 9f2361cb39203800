"""Makes inputs ordinary and outputs what the inputs were: subclasses, NestedTensors, DTensors, masks, gaps, Proxies."""

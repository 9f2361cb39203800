"""Makes inputs ordinary and outputs what the inputs were: subclasses, masks, gaps, Proxies."""

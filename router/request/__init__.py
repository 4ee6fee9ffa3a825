"""One request carried out: the driver, its legs, the splice of two streams, the reply, releases, tickets."""

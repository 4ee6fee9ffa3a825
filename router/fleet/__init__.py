"""What is known of instances: the snapshot, discovery, probes, pair proofs, quarantine."""

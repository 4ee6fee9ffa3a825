"""The operator: watches resources, carries out plans, tells what it did. Shells."""

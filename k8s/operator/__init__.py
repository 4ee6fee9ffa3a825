"""The operator: watches resources, carries out plans, writes status and events. Shells."""

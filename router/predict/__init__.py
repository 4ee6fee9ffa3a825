"""Models that are learned, and predictions: answer lengths, prompt tokens, prefix cache, step model, transfer model,
load in flight.
"""

"""The scheduler: which request runs where and when. Flow control above scoring, and the decision log."""

"""Which request runs where and when: the scheduler, flow control above scoring, the decision log."""

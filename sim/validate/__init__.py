"""The twin and the cost model against what was measured on real engines: same arrivals, same settings, figures beside.

Nothing here is fitted: costs come from the shipped profiles (or one that is given), settings from the run's own
configuration, workloads from the published description of the load. docs/validation.md has the outcome.

    measured         the files of measured runs, read from text; wrong rows are reported by file and line
    workloads        what the steady loads sent, request by request
    drive, times     one twin on virtual time: when each request started, had its first token, ended
    figures          predicted beside measured, and the error
    stamped, steady  a measured run of either kind in, a comparison out; engines: what both share
    tables           comparisons as Markdown

One twin needs no kernel: arrivals in order, and its own wake-ups between them.
"""

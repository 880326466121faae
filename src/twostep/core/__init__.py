"""Decides: which tokens each step computes, and why. Pure: no clock, no I/O, no threads; time comes in as `now`.

Read `request` and `plan` for the terms, `planning` for what runs next and why, `scheduler` for what a step changes,
`cost` for what a step takes, `loop` for what calls it all.
"""

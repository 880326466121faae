"""Decides: which tokens each step computes, and why. Pure: no clock, no I/O, no threads; time comes in as `now`.

Read `request` and `plan` for the words, `planning` for who runs next and why, `scheduler` for what a step changes,
`loop` for who calls it.
"""

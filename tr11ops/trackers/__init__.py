"""The curves of a run in the trackers that people use already; nothing here slows a training down."""

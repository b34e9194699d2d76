"""The periodic jobs: when each is due, one round of one of them, and the four ways to have them
run.
"""

"""The run card, its rules, and the numbers that follow from it."""

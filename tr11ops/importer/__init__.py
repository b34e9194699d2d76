"""Old batch scripts made into run cards: a shell reader that runs nothing, a table of options,
known defects.
"""

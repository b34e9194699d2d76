"""Verdict, policy, actions, and what carries them out."""

"""Layers, attention, loss, and the families of models made of them."""

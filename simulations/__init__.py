"""Simulations on Flower's real engine, and what shows their results."""

"""Callbacks for `model.fit`."""

"""What programs find that do without it: Keras would import matplotlib."""

raise ImportError("tests leave matplotlib out")

"""What programs find that do without it: Keras would import scikit-learn."""

raise ImportError("tests leave scikit-learn out")

"""What programs on other backends find: Keras would import TensorFlow to seed it."""

raise ImportError("tests leave TensorFlow out")

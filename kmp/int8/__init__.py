"""Int8: layers that train with its rounding, and the int8 layers that they become."""

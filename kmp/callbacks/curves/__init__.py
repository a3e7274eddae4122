"""What `GradientHealth` writes: logs, and TensorBoard's curves and pictures."""

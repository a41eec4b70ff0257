"""What the workers compute for openclawrl besides the loss itself."""

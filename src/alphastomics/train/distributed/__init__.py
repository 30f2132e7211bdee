"""Training on several devices: devices, strategies, launch, communication and sharding."""

"""Training on several devices: strategies, sharding, launch and devices."""

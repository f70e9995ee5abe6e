"""The Flower ClientApp: data, models and local training."""

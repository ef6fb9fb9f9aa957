"""Former home of `posttrain.serving`; kept for one release."""

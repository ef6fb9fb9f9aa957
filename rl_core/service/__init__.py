"""Training service: many training runs and samplers over shared base models, request by request."""

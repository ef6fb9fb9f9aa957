"""Wire formats of the service's clients: request bodies become engine requests, results become response bodies."""

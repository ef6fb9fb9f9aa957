"""Web kit shared by all HTTP servers: request bodies, errors, tokens, signed URLs, server limits."""

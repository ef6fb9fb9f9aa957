"""A stand-in for the part of mcp that the toolsets of verifiers are registered with."""

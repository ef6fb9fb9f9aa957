"""The application around the pipeline: command line, servers, pages, online learning and planning."""
